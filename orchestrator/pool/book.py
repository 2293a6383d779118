"""Which checkpoints are there, which of them is a prompt's longest start, what is each worth?

The book only records; what to keep and what to give up is decided in `pool`. A look-up follows
the prompt's own path in a radix tree and costs the same with ten checkpoints and ten thousand.

Invariants: a path has at most one checkpoint in each tier; `latest` names, for every chat, the
turn checkpoint of its newest turn; the exported totals are those of the exported checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestrator.pool.checkpoint import Checkpoint, Conversation
from orchestrator.pool.eviction import LATEST_TURN, OF_ONE_TURN, SHARED, SUPERSEDED, Standing
from orchestrator.pool.index import PrefixIndex

_TOKEN_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Seed:
    """What a lane starts from: the first `length` tokens of a checkpoint."""

    checkpoint: Checkpoint
    length: int


class Book:
    """All checkpoints. `divisible` says that rows can be cut anywhere (attention only)."""

    def __init__(self, *, divisible: bool) -> None:
        self._divisible = divisible
        self._index: PrefixIndex[Checkpoint] = PrefixIndex()
        self._of: dict[Conversation, dict[Checkpoint, None]] = {}
        self.checkpoints: dict[Checkpoint, None] = {}
        self.latest: dict[Conversation, Checkpoint] = {}
        self.exported_bytes = 0
        self.exported_tokens = 0
        self.version = 0  # moves whenever a look-up may answer differently
        self._clock = 0

    # ---- what there is ------------------------------------------------------------------------

    def resident(self) -> Iterator[Checkpoint]:
        """All checkpoints in sequences of the pool."""
        return (c for c in self.checkpoints if c.sequence is not None)

    def exported(self) -> Iterator[Checkpoint]:
        """All checkpoints in host memory."""
        return (c for c in self.checkpoints if c.sequence is None)

    def of(self, conversation: Conversation) -> Iterable[Checkpoint]:
        """All checkpoints that turns of a conversation kept."""
        return list(self._of.get(conversation, ()))

    def is_latest_turn(self, checkpoint: Checkpoint) -> bool:
        """Return whether this is what its conversation's next turn will start from."""
        return self.latest.get(checkpoint.conversation) is checkpoint

    def longest(self, prompt: bytes) -> Seed | None:
        """Return the longest start for a packed prompt that leaves a token to evaluate.

        Of two equally long ones the resident one.
        """
        most = len(prompt) // _TOKEN_WIDTH - 1
        if self._divisible:
            shared, holders = self._index.nearest(prompt)
            length = min(shared, most)
            if length <= 0:
                return None
            return Seed(max(holders, key=lambda c: (c.sequence is not None, c.tick)), length)
        found = None
        for length, checkpoint in self._index.prefixes(prompt):
            ties = found is not None and found.length == length
            if length <= most and not (ties and checkpoint.sequence is None):
                found = Seed(checkpoint, length)
        return found

    def serves(self, path: bytes) -> bool:
        """Return whether what is kept already gives back all of a packed path."""
        n_path = len(path) // _TOKEN_WIDTH
        if self._divisible:
            return self._index.nearest(path)[0] == n_path
        return any(length == n_path for length, _ in self._index.prefixes(path))

    def within(self, path: bytes) -> list[Checkpoint]:
        """Return the checkpoints whose whole path is a prefix of `path`."""
        return [checkpoint for _, checkpoint in self._index.prefixes(path)]

    def standing(self, checkpoint: Checkpoint) -> Standing:
        """Return how much a checkpoint is worth; see `eviction`."""
        return Standing(
            self._group(checkpoint), self._replay(checkpoint), self._clock - checkpoint.tick
        )

    def _group(self, checkpoint: Checkpoint) -> int:
        if checkpoint.is_superseded:
            return SUPERSEDED
        if self.is_latest_turn(checkpoint):
            return LATEST_TURN
        shared = checkpoint.is_common and len(checkpoint.users) > 1
        return SHARED if shared else OF_ONE_TURN

    def _replay(self, checkpoint: Checkpoint) -> int:
        if self._divisible:
            return checkpoint.length
        lengths = [
            length
            for length, other in self._index.prefixes(checkpoint.path)
            if other is not checkpoint and not other.is_superseded
        ]
        return checkpoint.length - max(lengths, default=0)

    # ---- what changes -------------------------------------------------------------------------

    def add(self, checkpoint: Checkpoint) -> None:
        """Enter a new checkpoint."""
        self.checkpoints[checkpoint] = None
        self._of.setdefault(checkpoint.conversation, {})[checkpoint] = None
        self._index.add(checkpoint.path, checkpoint)
        self.version += 1
        if checkpoint.sequence is None:
            self._weigh(checkpoint, 1)
        self.touch(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Strike a checkpoint out; raises `KeyError` when it is not there."""
        del self.checkpoints[checkpoint]
        own = self._of[checkpoint.conversation]
        del own[checkpoint]
        if not own:
            del self._of[checkpoint.conversation]
        self._index.remove(checkpoint.path, checkpoint)
        self.version += 1
        if checkpoint.sequence is None:
            self._weigh(checkpoint, -1)
        if self.is_latest_turn(checkpoint):
            del self.latest[checkpoint.conversation]

    def move_out(self, checkpoint: Checkpoint, n_bytes: int) -> None:
        """Note that a resident checkpoint now lives in `n_bytes` of host memory."""
        checkpoint.sequence, checkpoint.n_bytes = None, n_bytes
        self._weigh(checkpoint, 1)
        self.version += 1

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note a use."""
        self._clock += 1
        checkpoint.tick = self._clock

    def outdated(self, conversation: Conversation, serial: int) -> list[Checkpoint]:
        """Return what turns of a conversation before the admission `serial` keep for it alone."""
        return [
            c
            for c in self.of(conversation)
            if c.serial < serial and not c.is_common and c.users <= {conversation}
        ]

    def supersede(self, turn: Checkpoint) -> None:
        """Note that a chat goes on from `turn`: what its earlier turns kept is past."""
        self.latest[turn.conversation] = turn
        for checkpoint in self.outdated(turn.conversation, turn.serial):
            checkpoint.is_superseded = True

    def _weigh(self, checkpoint: Checkpoint, sign: int) -> None:
        self.exported_bytes += sign * checkpoint.n_bytes
        self.exported_tokens += sign * checkpoint.length
