"""Which checkpoints are kept, what does a request start from, and what makes room?

The pool decides and remembers; it carries nothing out. Every decision is a frozen plan made whole
before anything changes, and the engine reports back what it did:

    plan_admission ─▶ Admission ─▶ (evict, copy) ─▶ admitted
    plan_keep      ─▶ Keep      ─▶ (evict, copy) ─▶ kept
    plan_release   ─▶ Release   ─▶ (clear)       ─▶ released

Every sequence is free, a lane, or one checkpoint. The pool knows no llama.cpp: it sees cells
through a `Ledger` and sequences as numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.errors import InvalidArgument
from orchestrator.pool.checkpoint import Checkpoint, Conversation, Kind, Stop
from orchestrator.pool.eviction import Standing, fewest, leaving_order
from orchestrator.pool.index import PrefixIndex
from orchestrator.pool.ledger import Ledger
from orchestrator.pool.placement import place

_TOKEN_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Seed:
    """What a lane starts from: the first `length` tokens of a checkpoint."""

    checkpoint: Checkpoint
    length: int


@dataclass(frozen=True, slots=True)
class Admission:
    """How a request gets a lane.

    Evict `evicted`; then, with a seed, copy it to `sequence`, or cut it in place where `sequence`
    is the seed's own (no other was to be had, so the lane takes the checkpoint over).
    """

    sequence: int
    seed: Seed | None
    evicted: tuple[Checkpoint, ...]
    stops: tuple[Stop, ...]
    conversation: Conversation
    serial: int

    @property
    def takes_over(self) -> bool:
        """Whether the lane lives in the seed's own sequence."""
        return self.seed is not None and self.seed.checkpoint.sequence == self.sequence


@dataclass(frozen=True, slots=True)
class Keep:
    """Evict `evicted`, copy the lane to the checkpoint's sequence, then tell `kept`."""

    checkpoint: Checkpoint
    evicted: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A lane ends: its sequence becomes `checkpoint`, or is to be cleared where that is None.

    `evicted` are checkpoints that the new one makes pointless.
    """

    sequence: int
    checkpoint: Checkpoint | None
    evicted: tuple[Checkpoint, ...] = ()


class Pool:
    """The checkpoints of `n_sequences` sequences.

    `divisible` says that rows can be cut anywhere (attention only). `history` is how many
    superseded turn and reply checkpoints may stay while nothing else wants their room.
    """

    def __init__(
        self, n_sequences: int, ledger: Ledger, *, divisible: bool, history: int = 0
    ) -> None:
        if n_sequences < 1 or history < 0:
            raise InvalidArgument(
                f"a pool of {n_sequences} sequences with {history} in history cannot be; "
                "give at least 1 sequence and a history of 0 or more"
            )
        self._ledger = ledger
        self._divisible = divisible
        self._history = history
        self._n_sequences = n_sequences
        self._free = set(range(n_sequences))
        self._lanes: set[int] = set()
        self._index: PrefixIndex[Checkpoint] = PrefixIndex()
        self._ticks: dict[Checkpoint, int] = {}  # every checkpoint there is, by last use
        self._superseded: set[Checkpoint] = set()
        self._latest: dict[Conversation, Checkpoint] = {}
        self._clock = 0
        self._serial = 0

    # ---- what there is ------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Collection[Checkpoint]:
        """All checkpoints, in no particular order."""
        return self._ticks.keys()

    @property
    def free_sequences(self) -> int:
        """Sequences that neither a lane nor a checkpoint holds."""
        return len(self._free)

    def count_by_kind(self) -> dict[Kind, int]:
        """Return how many checkpoints there are of each kind."""
        return dict(Counter(checkpoint.kind for checkpoint in self._ticks))

    def is_latest_turn(self, checkpoint: Checkpoint) -> bool:
        """Return whether this is what its conversation's next turn will start from."""
        return self._latest.get(checkpoint.conversation) is checkpoint

    # ---- admission ----------------------------------------------------------------------------

    def plan_admission(
        self,
        prompt: bytes,
        *,
        turn: int = 0,
        conversation: Conversation | None = None,
        cache: bool = True,
    ) -> Admission | None:
        """Return how a packed `prompt` gets a lane, None while there is no room for it.

        With `cache` False the request starts cold and keeps nothing.
        """
        n_prompt = len(prompt) // _TOKEN_WIDTH
        seed = self._find(prompt, n_prompt) if cache else None
        seeded = seed.length if seed else 0
        room = self._room_for_lane(seed, n_prompt - seeded)
        if room is None:
            return None
        sequence, evicted = room
        if conversation is None:
            conversation = seed.checkpoint.conversation if seed else self._serial
        stops = place(n_prompt, turn, seeded, divisible=self._divisible) if cache else ()
        return Admission(sequence, seed, evicted, stops, conversation, self._serial)

    def admitted(self, admission: Admission) -> None:
        """Note that an admission was carried out; its evicted checkpoints were dropped before."""
        self._serial += 1
        seed = admission.seed
        if seed is not None and 2 * seed.length >= seed.checkpoint.length:
            self._touch(seed.checkpoint)  # a use counts only if it took a real part
        if admission.takes_over and seed is not None:
            self.drop(seed.checkpoint)
        self._free.remove(admission.sequence)
        self._lanes.add(admission.sequence)

    # ---- keeping ------------------------------------------------------------------------------

    def plan_keep(self, admission: Admission, path: bytes, kind: Kind) -> Keep | None:
        """Return how the state of a lane at the packed `path` is kept, None if it cannot be."""
        if self._serves(path):
            return None
        leaving = self._overflow(admission) if kind == "turn" else []
        room = self._room(sequences=1, leaving=leaving, protected=self._dearer(admission, kind))
        if room is None:
            return None
        sequence = self._pick([*room, *leaving])
        checkpoint = self._checkpoint(sequence, path, kind, admission)
        return Keep(checkpoint, (*leaving, *room))

    def kept(self, keep: Keep) -> None:
        """Note that a checkpoint now stands in its sequence."""
        self._free.remove(keep.checkpoint.sequence)
        self._insert(keep.checkpoint)
        if keep.checkpoint.kind == "turn":
            self._supersede(keep.checkpoint)

    def plan_release(self, admission: Admission, path: bytes, kind: Kind | None) -> Release:
        """Return what becomes of a lane that ends at `path`; `kind` None keeps nothing."""
        sequence = admission.sequence
        if kind is None or not path or self._serves(path):
            return Release(sequence, None)
        checkpoint = self._checkpoint(sequence, path, kind, admission)
        pointless = [
            other for length, other in self._index.prefixes(path) if self._divisible and length
        ]
        return Release(sequence, checkpoint, tuple(pointless))

    def released(self, release: Release) -> None:
        """Note that a lane ended."""
        self._lanes.remove(release.sequence)
        if release.checkpoint is None:
            self._free.add(release.sequence)
        else:
            self._insert(release.checkpoint)

    # ---- leaving ------------------------------------------------------------------------------

    def plan_room(self, cells: int) -> tuple[Checkpoint, ...] | None:
        """Return what to evict so that `cells` are free, None if that cannot be had."""
        return self._room(cells=cells)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint's sequence was cleared, or taken over by a lane."""
        del self._ticks[checkpoint]
        self._index.remove(checkpoint.path, checkpoint)
        self._superseded.discard(checkpoint)
        if self.is_latest_turn(checkpoint):
            del self._latest[checkpoint.conversation]
        self._free.add(checkpoint.sequence)

    # ---- how it is decided --------------------------------------------------------------------

    def _find(self, prompt: bytes, n_prompt: int) -> Seed | None:
        """Return the longest start for a prompt that leaves at least one token to evaluate."""
        if self._divisible:
            length, holders = self._index.nearest(prompt)
            length = min(length, n_prompt - 1)
            if length == 0:
                return None
            return Seed(max(holders, key=self._ticks.__getitem__), length)
        found = None
        for length, checkpoint in self._index.prefixes(prompt):
            if length < n_prompt:
                found = Seed(checkpoint, length)
        return found

    def _room_for_lane(
        self, seed: Seed | None, cells: int
    ) -> tuple[int, tuple[Checkpoint, ...]] | None:
        """Return a sequence for a lane and what leaves for it, if need be the seed's own."""
        holder = [seed.checkpoint] if seed else []
        room = self._room(cells=cells, sequences=1, protected=holder)
        if room is not None:
            return self._pick(room), room
        if seed is None:
            return None
        spare = seed.checkpoint.length - seed.length if self._divisible else 0
        room = self._room(cells=cells - spare, protected=holder)
        return None if room is None else (seed.checkpoint.sequence, room)

    def _room(
        self,
        *,
        cells: int = 0,
        sequences: int = 0,
        protected: Collection[Checkpoint] = (),
        leaving: Sequence[Checkpoint] = (),
    ) -> tuple[Checkpoint, ...] | None:
        """Return the victims, besides those `leaving` anyway, that make the room asked for."""

        def enough(victims: Sequence[Checkpoint]) -> bool:
            gone = [checkpoint.sequence for checkpoint in (*leaving, *victims)]
            if len(self._free) + len(gone) < sequences:
                return False
            return self._ledger.fits(cells - self._ledger.freed_by(gone))

        if enough(()):
            return ()
        staying = (c for c in self._ticks if c not in protected and c not in leaving)
        return fewest(leaving_order(staying, self._standing), enough)

    def _dearer(self, admission: Admission, kind: Kind) -> list[Checkpoint]:
        """Return what a new checkpoint of this kind is not worth evicting.

        Where the conversation has a turn checkpoint, a resend point saves a few tokens more; no
        chat's next turn is given up for that. Where it has none, it saves the whole prompt.
        """
        if kind != "resend" or admission.conversation not in self._latest:
            return []
        return list(self._latest.values())

    def _overflow(self, admission: Admission) -> list[Checkpoint]:
        """Return what of its chat leaves once this turn keeps a checkpoint of its own."""
        outdated = self._outdated(admission.conversation, admission.serial)
        lasting = [c for c in outdated if c.kind in ("turn", "reply")]
        lasting.extend(c for c in self._superseded if c.conversation != admission.conversation)
        lasting.sort(key=self._ticks.__getitem__)
        beyond = set(lasting[: max(0, len(lasting) - self._history)])
        return [c for c in self._ticks if c in beyond or (c in outdated and c not in lasting)]

    def _outdated(self, conversation: Conversation, serial: int) -> list[Checkpoint]:
        """Return what earlier turns of a conversation keep."""
        return [c for c in self._ticks if c.conversation == conversation and c.serial < serial]

    def _supersede(self, turn: Checkpoint) -> None:
        self._latest[turn.conversation] = turn
        self._superseded.update(self._outdated(turn.conversation, turn.serial))

    def _standing(self, checkpoint: Checkpoint) -> Standing:
        return Standing(
            is_latest_turn=self.is_latest_turn(checkpoint),
            is_current=checkpoint not in self._superseded,
            tick=self._ticks[checkpoint],
        )

    def _pick(self, leaving: Iterable[Checkpoint]) -> int:
        """Return the lowest sequence that is free once `leaving` are gone."""
        return min(self._free.union(checkpoint.sequence for checkpoint in leaving))

    def _serves(self, path: bytes) -> bool:
        """Return whether what is kept already gives back all of `path`."""
        n_path = len(path) // _TOKEN_WIDTH
        if self._divisible:
            return self._index.nearest(path)[0] == n_path
        return any(length == n_path for length, _ in self._index.prefixes(path))

    def _checkpoint(
        self, sequence: int, path: bytes, kind: Kind, admission: Admission
    ) -> Checkpoint:
        length = len(path) // _TOKEN_WIDTH
        return Checkpoint(sequence, path, length, kind, admission.conversation, admission.serial)

    def _insert(self, checkpoint: Checkpoint) -> None:
        self._index.add(checkpoint.path, checkpoint)
        self._touch(checkpoint)

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._clock += 1
        self._ticks[checkpoint] = self._clock
