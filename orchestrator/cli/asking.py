"""How is every reply of one chat asked for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.cli.opening import ChatEngine, Messages, ReplyStream
from orchestrator.engine.request import Sampling


@dataclass(frozen=True, slots=True)
class Asking:
    """What does not change from reply to reply. `sampling` None is the model's own default."""

    sampling: Sampling | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    use_cache: bool = True
    verbose: bool = False

    def ask(
        self, engine: ChatEngine, messages: Messages, conversation: str | None = None
    ) -> ReplyStream:
        """Send `messages`; `conversation` names the chat they are a turn of."""
        return engine.chat(
            messages,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            template_arguments=self.template_arguments,
            conversation=conversation,
            use_cache=self.use_cache,
            priority="interactive",
        )
