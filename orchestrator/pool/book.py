"""Which checkpoints are there, which of them is a prompt's longest start, what is each worth?

The book only records; what to keep and what to give up is decided in `pool`. A look-up follows
the prompt's own path in an index and costs about the same with ten checkpoints and ten thousand.

Invariants: a path has at most one checkpoint in each tier; `latest` names, for every chat, the
turn checkpoint of its newest turn; the totals are those of what takes host memory: snapshots, and
the rows and states of exported holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestrator.pool.checkpoint import Checkpoint, Conversation, Holder
from orchestrator.pool.eviction import LATEST_TURN, OF_ONE_TURN, SHARED, SUPERSEDED, Standing, worth
from orchestrator.pool.index import PrefixIndex, Span

_TOKEN_WIDTH = 4
_FEW = 100  # look-ups that take as long as walking the whole tree of a thousand checkpoints


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
        self._established: set[Conversation] = set()  # chats that went on once
        self._spans: tuple[int, dict[Checkpoint, Span]] = (-1, {})
        self._replays: tuple[int, dict[Checkpoint, int]] = (-1, {})

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

        Of two equally long ones the one nearer at hand: whole, then resident, then exported.
        """
        most = len(prompt) // _TOKEN_WIDTH - 1
        if self._divisible:
            shared, holders = self._index.nearest(prompt)
            length = min(shared, most)
            if length <= 0:
                return None
            return Seed(max(holders, key=lambda c: (_nearness(c), c.tick)), length)
        found = self._index.deepest(prompt, most)
        return None if found is None else Seed(max(found[1], key=_nearness), found[0])

    def serves(self, path: bytes) -> bool:
        """Return whether what is kept already gives back all of a packed path."""
        if self._divisible:
            return self._index.nearest(path)[0] == len(path) // _TOKEN_WIDTH
        return bool(self._index.at(path))

    def at(self, path: bytes) -> list[Checkpoint]:
        """Return the checkpoints whose whole path is `path`."""
        return self._index.at(path)

    def within(self, path: bytes) -> list[Checkpoint]:
        """Return the checkpoints whose whole path is a prefix of `path`."""
        return [checkpoint for _, checkpoint in self._index.prefixes(path)]

    def standing(self, checkpoint: Checkpoint) -> Standing:
        """Return how much a checkpoint is worth; see `eviction`."""
        return Standing(
            self._group(checkpoint),
            self._replay(checkpoint),
            self._clock - checkpoint.tick,
            len(checkpoint.users),
        )

    def _group(self, checkpoint: Checkpoint) -> int:
        if checkpoint.is_superseded:
            return SUPERSEDED
        if self.is_latest_turn(checkpoint):
            return LATEST_TURN if self._is_chat(checkpoint.conversation) else SHARED
        shared = checkpoint.is_wayside or (checkpoint.is_common and len(checkpoint.users) > 1)
        return SHARED if shared else OF_ONE_TURN

    def _is_chat(self, conversation: Conversation) -> bool:
        """Whether it has a name, or went on once; else it may well have been its only request."""
        return isinstance(conversation, str) or conversation in self._established

    def _replay(self, checkpoint: Checkpoint) -> int:
        """Return the tokens to read again if it were gone; a few are looked up, many surveyed."""
        if self._divisible:
            return checkpoint.length
        if self._replays[0] != self.version:
            self._replays = self.version, {}
        known = self._replays[1]
        if checkpoint not in known:
            many = len(known) >= _FEW or self._spans[0] == self.version
            found = self.spans()[checkpoint].before if many else self._from_above(checkpoint)
            known[checkpoint] = found
        return known[checkpoint]

    def _from_above(self, checkpoint: Checkpoint) -> int:
        """Return the tokens since the nearest other checkpoint that is not superseded."""
        path, reach = checkpoint.path, checkpoint.length
        if any(o is not checkpoint and not o.is_superseded for o in self._index.at(path)):
            return 0
        while (found := self._index.deepest(path, reach - 1)) is not None:
            reach, values = found
            if not all(other.is_superseded for other in values):
                return checkpoint.length - reach
        return checkpoint.length

    def spans(self) -> dict[Checkpoint, Span]:
        """Return where each checkpoint stands among those that are not superseded."""
        version, spans = self._spans
        if version != self.version:
            spans = self._index.spans(lambda checkpoint: not checkpoint.is_superseded)
            self._spans = self.version, spans
        return spans

    def history(self) -> list[Checkpoint]:
        """Return what serves only those who go back, the least worth first.

        Worth is reckoned among all that is kept, superseded or not, against recency.
        """
        spans = self._index.spans(lambda _: True)
        old = [c for c in self.checkpoints if c.is_history]

        def key(checkpoint: Checkpoint) -> tuple[float, int]:
            age = self._clock - checkpoint.tick
            return worth(spans[checkpoint]) / (age + 1), checkpoint.tick

        return sorted(old, key=key)

    # ---- what changes -------------------------------------------------------------------------

    def add(self, checkpoint: Checkpoint) -> None:
        """Enter a new checkpoint, in its holder as well."""
        holder = checkpoint.holder
        if not holder.checkpoints:
            self._weigh_rows(holder, 1)
        holder.checkpoints[checkpoint] = None
        self.checkpoints[checkpoint] = None
        self._of.setdefault(checkpoint.conversation, {})[checkpoint] = None
        self._index.add(checkpoint.path, checkpoint)
        self.version += 1
        self.exported_bytes += checkpoint.n_bytes
        self.touch(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Strike a checkpoint out; raises `KeyError` when it is not there."""
        del self.checkpoints[checkpoint]
        own = self._of[checkpoint.conversation]
        del own[checkpoint]
        if not own:
            del self._of[checkpoint.conversation]
            self._established.discard(checkpoint.conversation)
        self._index.remove(checkpoint.path, checkpoint)
        self.version += 1
        self.exported_bytes -= checkpoint.n_bytes
        holder = checkpoint.holder
        del holder.checkpoints[checkpoint]
        if not holder.checkpoints:
            self._weigh_rows(holder, -1)
        if self.is_latest_turn(checkpoint):
            del self.latest[checkpoint.conversation]

    def move_out(self, holder: Holder, n_bytes: int) -> None:
        """Note that a holder's rows now lie in `n_bytes` of host memory."""
        holder.sequence, holder.n_bytes = None, n_bytes
        self._weigh_rows(holder, 1)
        self.version += 1

    def trim(self, holder: Holder, length: int, n_bytes: int) -> None:
        """Note that an exported holder keeps `length` rows from now on."""
        self._weigh_rows(holder, -1)
        holder.length, holder.n_bytes = length, n_bytes
        self._weigh_rows(holder, 1)

    def save(self, checkpoint: Checkpoint, n_bytes: int, holder: Holder | None = None) -> None:
        """Note that a checkpoint's own state now takes `n_bytes` of host memory.

        With a `holder` its rows are kept by that one from now on.
        """
        self.exported_bytes += n_bytes - checkpoint.n_bytes
        checkpoint.n_bytes, checkpoint.is_live = n_bytes, False
        if holder is not None:
            self.move(checkpoint, holder)

    def move(self, checkpoint: Checkpoint, holder: Holder) -> None:
        """Note that another resident holder keeps a checkpoint's rows."""
        del checkpoint.holder.checkpoints[checkpoint]
        holder.checkpoints[checkpoint] = None
        checkpoint.holder = holder
        self.version += 1

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note a use, of all that stands on its way as well."""
        self._clock += 1
        for passed in self.within(checkpoint.path):
            passed.tick = self._clock
        checkpoint.tick = self._clock

    def outdated(self, conversation: Conversation, serial: int, path: bytes) -> list[Checkpoint]:
        """Return what a conversation has gone past once its turn `serial` has come to `path`.

        That is what its earlier turns on this path keep for it alone. Turns on other paths of the
        same name (it went back and said something else, or another agent goes by it) stay.
        """
        earlier = [
            c
            for c in self.of(conversation)
            if c.serial < serial and not c.is_common and c.users <= {conversation}
        ]
        turns = [c for c in earlier if c.kind == "turn"]
        elsewhere = [c.path for c in turns if not path.startswith(c.path)]
        return [c for c in earlier if not any(c.path.startswith(other) for other in elsewhere)]

    def supersede(self, turn: Checkpoint) -> None:
        """Note that a chat goes on from `turn`: what it has gone past is history."""
        self.latest[turn.conversation] = turn
        past = self.outdated(turn.conversation, turn.serial, turn.path)
        for checkpoint in past:
            checkpoint.is_superseded = True
        if past:
            self._established.add(turn.conversation)
        self.version += 1

    def _weigh_rows(self, holder: Holder, sign: int) -> None:
        if holder.sequence is None:
            self.exported_bytes += sign * holder.n_bytes
            self.exported_tokens += sign * holder.length


def _nearness(checkpoint: Checkpoint) -> int:
    """How little it takes to seed a lane from a checkpoint: 2 nothing, 1 a state, 0 its rows."""
    return 0 if checkpoint.sequence is None else 1 + checkpoint.is_live
