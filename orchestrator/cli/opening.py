"""What does a command need of an engine, and who opens it?

This is the seam of the command line: commands are written against these protocols and get the
function that opens an engine as `Seam.open_engine` from click's ``ctx.obj``. The real one is
`open_engine` below; tests hand in one that opens a fake. The real engine is imported when it is
first opened, so that ``--help`` and a wrong option answer without loading llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orchestrator.config import ModelSpec
    from orchestrator.engine.occupancy import EngineStats
    from orchestrator.engine.records import Record
    from orchestrator.engine.request import Event, Priority, Sampling

Messages = Sequence[Mapping[str, object]]
Progress = Callable[[str], None]


class ReplyStream(Protocol):
    """The events of one reply; the last one is a `Finished`."""

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt itself left a reasoning block open."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None:
        """End the reply within one token or chunk, from any thread."""


class ModelInfo(Protocol):
    """What is shown of a loaded model; `n_context` is in tokens."""

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def memory(self) -> str: ...
    @property
    def n_context(self) -> int: ...


class ChatEngine(Protocol):
    """As much of an engine as a chat uses."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of how the model was opened."""

    def unknown_arguments(self, arguments: Mapping[str, object]) -> list[str]:
        """Return the template arguments that the chat template never reads."""

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None,
        max_tokens: int | None,
        stop: Sequence[str],
        template_arguments: Mapping[str, object] | None,
        conversation: str | None,
        use_cache: bool,
        priority: Priority,
    ) -> ReplyStream: ...

    def stats(self) -> EngineStats:
        """Return what the engine holds and has done."""

    def report_to(self, sink: Callable[[Record], object]) -> None:
        """Hand what each request took to `sink` from now on, on the engine's thread."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a model is to be opened. None leaves the choice to the engine; `checkpoints` 0 is off.

    `exact`: replies are bitwise the same, warm or cold.
    """

    model: ModelSpec
    ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    chat_template: Path | None = None
    checkpoints: int | None = None
    exact: bool = False


OpenEngine = Callable[[Opening, Progress], AbstractContextManager[ChatEngine]]


def open_engine(opening: Opening, on_progress: Progress) -> AbstractContextManager[ChatEngine]:
    """Open the real engine. Raises `OrchestratorError` with what is wrong with the model."""
    from orchestrator import Engine

    return Engine.open(
        opening.model,
        ctx=opening.ctx,
        threads=opening.threads,
        gpu_layers=opening.gpu_layers,
        chat_template=opening.chat_template,
        checkpoints=opening.checkpoints,
        exact=opening.exact,
        on_progress=on_progress,
    )


@dataclass(frozen=True, slots=True)
class Seam:
    """What the commands get from outside, in click's ``ctx.obj``."""

    open_engine: OpenEngine = open_engine
