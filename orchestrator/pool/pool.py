"""Which checkpoints are kept, what does a request start from, and what makes room?

The pool decides and remembers; it carries nothing out. Every decision is a frozen plan made whole
before anything changes, and the engine reports back what it did:

    plan_admission ─▶ Admission ─▶ (evict, copy or import) ─▶ admitted
    plan_keep      ─▶ Keep      ─▶ (evict, copy or save)   ─▶ kept
    plan_release   ─▶ Release   ─▶ (evict, clear or save)  ─▶ released
    plan_export    ─▶ Export    ─▶ exporting, (move)       ─▶ exported

Every sequence is free, a lane, or one checkpoint. The pool knows no llama.cpp: it sees cells
through a `Ledger`, sequences as numbers and bytes as estimates that are never too small.

Invariants: lanes and resident checkpoints take no more cells than the resident budget while there
is a checkpoint that could leave; exported checkpoints, those still on their way out included, fit
their budgets; what a lease holds stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from orchestrator.errors import InvalidArgument
from orchestrator.pool.book import Book, Seed
from orchestrator.pool.checkpoint import Checkpoint, Conversation, Kind
from orchestrator.pool.eviction import fewest, leaving_order
from orchestrator.pool.ledger import Ledger
from orchestrator.pool.placement import place_simply
from orchestrator.pool.plans import (
    TOKEN_WIDTH,
    Admission,
    Budgets,
    Claim,
    Export,
    Keep,
    Release,
    Weights,
)

EXPORT_LEAST = 16
"""Tokens that a checkpoint must save to be moved to host memory and back rather than read again.

The demo model breaks even at about 4 (`tests/bench_tiers.py` prints it for any model); host memory
is worth more than that.
"""


class Pool:
    """The checkpoints of `n_sequences` sequences; see the module's head.

    `divisible` says that rows can be cut anywhere (attention only). With `resident` False
    sequences are for lanes alone and every checkpoint is exported at once. `low_lanes` keeps
    lanes on low sequence ids, which pure recurrent memory decodes together.
    """

    def __init__(
        self,
        n_sequences: int,
        ledger: Ledger,
        *,
        divisible: bool,
        budgets: Budgets | None = None,
        weights: Weights | None = None,
        resident: bool = True,
        low_lanes: bool = False,
    ) -> None:
        if n_sequences < 1:
            raise InvalidArgument(f"a pool of {n_sequences} sequences cannot be; give at least 1")
        self.book = Book(divisible=divisible)
        self.budgets = budgets or Budgets()
        self._weights = weights or Weights()
        self._ledger = ledger
        self._divisible = divisible
        self._resident = resident
        self._low_lanes = low_lanes
        self._free = set(range(n_sequences))
        self._lanes: set[int] = set()
        self._moving: dict[Checkpoint, int] = {}  # bytes reserved for what is on its way out
        self._saving: dict[Checkpoint, int] = {}  # bytes reserved for what goes there from a lane
        self._arriving: dict[int, int] = {}  # tokens that an import brings to a lane's sequence
        self._serial = 0

    # ---- what there is ------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Collection[Checkpoint]:
        """All checkpoints, in no particular order."""
        return self.book.checkpoints.keys()

    @property
    def free_sequences(self) -> int:
        """Sequences that neither a lane nor a checkpoint holds."""
        return len(self._free)

    @property
    def moving(self) -> tuple[Checkpoint, ...]:
        """Checkpoints on their way to host memory."""
        return tuple(self._moving)

    @property
    def exported_bytes(self) -> int:
        """Host memory of exported checkpoints, those still on their way out included."""
        under_way = sum(self._moving.values()) + sum(self._saving.values())
        return self.book.exported_bytes + under_way

    @property
    def exported_tokens(self) -> int:
        """Tokens of exported checkpoints, those still on their way out included."""
        under_way = sum(c.length for c in (*self._moving, *self._saving))
        return self.book.exported_tokens + under_way

    # ---- admission ----------------------------------------------------------------------------

    def plan_admission(self, claim: Claim) -> Admission | None:
        """Return how a request gets a lane, None while there is no room for it."""
        seed = self.book.longest(claim.path) if claim.reuses else claim.own
        room = self._room_for_lane(claim, seed)
        if room is None:
            return None
        sequence, evicted = room
        seeded = seed.length if seed else 0
        stops = (
            place_simply(
                claim.length, claim.turn, seeded, base=claim.base, divisible=self._divisible
            )
            if claim.keeps
            else ()
        )
        chat = self._chat(claim, seed)
        turn = self._turn_of(claim)
        return Admission(
            *(sequence, seed, evicted, stops, chat, self._serial, claim.keeps),
            turn=turn,
            has_turn=claim.turn > 0,
        )

    def admitted(self, admission: Admission) -> None:
        """Note that an admission was carried out; its evicted checkpoints are gone already."""
        self._serial += 1
        seed = admission.seed
        if seed is not None and 2 * seed.length >= seed.checkpoint.length:
            self.book.touch(seed.checkpoint)  # a use counts only if it took a real part
            seed.checkpoint.users.add(admission.conversation)
        if admission.turn is not None:
            admission.turn.users.add(admission.conversation)
        if admission.takes_over and seed is not None:
            self.drop(seed.checkpoint)
        if seed is not None and seed.checkpoint.sequence is None:
            self._arriving[admission.sequence] = seed.checkpoint.length
        self._free.remove(admission.sequence)
        self._lanes.add(admission.sequence)

    def arrived(self, admission: Admission) -> None:
        """Note that an import is over: the lane holds its seed, or nothing."""
        self._arriving.pop(admission.sequence, None)

    def _turn_of(self, claim: Claim) -> Checkpoint | None:
        """Return the checkpoint that the next turn of a claim's chat will start from."""
        if not (claim.turn and claim.keeps):
            return None
        reached = self.book.within(claim.path[: claim.turn * TOKEN_WIDTH])
        return next((c for c in reached if c.length == claim.turn), None)

    def _chat(self, claim: Claim, seed: Seed | None) -> Conversation:
        """Return whose turn this is: by name, else by the prefix it goes on from."""
        if claim.conversation is not None:
            return claim.conversation
        if seed is None or seed.checkpoint.is_common:
            return self._serial
        return seed.checkpoint.conversation

    # ---- keeping ------------------------------------------------------------------------------

    def plan_keep(self, admission: Admission, path: bytes, kind: Kind) -> Keep | None:
        """Return how the state of a lane at the packed `path` is kept, None if it cannot be."""
        if not admission.keeps or self.book.serves(path):
            return None
        leaving = self._overflow(admission) if kind == "turn" else []
        protected = self._dearer(admission, kind)
        room = self._room(sequences=1, leaving=leaving, protected=protected)
        if not self._resident or room is None:
            return self._keep_exported(admission, path, kind, leaving)
        sequence = self._pick_spare([*room, *leaving])
        checkpoint = self._checkpoint(sequence, path, kind, admission)
        return Keep(checkpoint, (*leaving, *room))

    def saving(self, keep: Keep) -> None:
        """Note that a state is on its way from its lane to host memory, until `kept`."""
        self._saving[keep.checkpoint] = keep.checkpoint.n_bytes

    def unsaved(self, keep: Keep) -> None:
        """Note that a state on its way from its lane goes no further."""
        self._saving.pop(keep.checkpoint, None)

    def kept(self, keep: Keep) -> None:
        """Note that a checkpoint now stands where it was planned."""
        checkpoint = keep.checkpoint
        self.unsaved(keep)
        if checkpoint.sequence is not None:
            self._free.remove(checkpoint.sequence)
        self._enter(checkpoint)

    def plan_release(self, admission: Admission, path: bytes, kind: Kind | None) -> Release:
        """Return what becomes of a lane that ends at `path`; `kind` None keeps nothing."""
        sequence = admission.sequence
        if kind is None or not admission.keeps or not path or self.book.serves(path):
            return Release(sequence, None)
        pointless = [c for c in self.book.within(path) if self._divisible and not c.leases]
        named = isinstance(admission.conversation, str)  # else it may well be the only request
        heads = kind == "reply" and named and not admission.has_turn
        if heads:
            pointless += [c for c in self._overflow(admission) if c not in pointless]
        if not self._resident:
            keep = self._keep_exported(admission, path, kind, pointless)
            if keep is None:
                return Release(sequence, None)
            return Release(sequence, keep.checkpoint, keep.evicted, heads)
        checkpoint = self._checkpoint(self._spare_for(sequence), path, kind, admission)
        return Release(sequence, checkpoint, tuple(pointless), heads)

    def released(self, release: Release) -> None:
        """Note that a lane ended."""
        self._lanes.remove(release.sequence)
        self._arriving.pop(release.sequence, None)
        checkpoint = release.checkpoint
        if checkpoint is None or checkpoint.sequence != release.sequence:
            self._free.add(release.sequence)
        if checkpoint is not None:
            if checkpoint.sequence != release.sequence and checkpoint.sequence is not None:
                self._free.remove(checkpoint.sequence)
            for pointless in release.evicted if self._divisible else ():
                checkpoint.users |= pointless.users  # whoever went on from it goes on from this
            self._enter(checkpoint)
            if release.heads:
                self.book.supersede(checkpoint)

    def _keep_exported(
        self, admission: Admission, path: bytes, kind: Kind, leaving: Sequence[Checkpoint]
    ) -> Keep | None:
        """Return how a state is saved to host memory at once, None if it is not worth it."""
        checkpoint = self._checkpoint(None, path, kind, admission)
        if self._resident and kind not in ("turn", "shared"):
            return None
        room = self._exported_room(checkpoint, leaving)
        if room is None:
            return None
        checkpoint.n_bytes = self._weights.of(checkpoint.length)
        return Keep(checkpoint, (*leaving, *room))

    def _enter(self, checkpoint: Checkpoint) -> None:
        self.book.add(checkpoint)
        checkpoint.users.add(checkpoint.conversation)
        if checkpoint.kind == "turn":
            self.book.supersede(checkpoint)

    # ---- moving to host memory ----------------------------------------------------------------

    def plan_export(self, checkpoint: Checkpoint) -> Export | None:
        """Return how a resident checkpoint moves to host memory, None if it should not.

        It should where the budgets allow it, where reading its tokens again would take longer
        than moving them, and where only what is worth less has to leave for it.
        """
        standing = self.book.standing(checkpoint)
        wanted = checkpoint.leases > 0 or standing.replay >= EXPORT_LEAST
        if checkpoint.is_superseded or checkpoint in self._moving or not wanted:
            return None
        room = self._exported_room(checkpoint, ())
        return None if room is None else Export(checkpoint, room, self._weigh(checkpoint))

    def exporting(self, export: Export) -> None:
        """Note that a checkpoint is on its way out; it stays where it is until `exported`."""
        self._moving[export.checkpoint] = export.n_bytes
        export.checkpoint.leases += 1

    def exported(self, checkpoint: Checkpoint, n_bytes: int) -> None:
        """Note that a checkpoint arrived in host memory and its sequence was cleared."""
        self.stayed(checkpoint)
        if checkpoint.sequence is not None:
            self._free.add(checkpoint.sequence)
        self.book.move_out(checkpoint, n_bytes)

    def stayed(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint on its way out goes no further."""
        del self._moving[checkpoint]
        checkpoint.leases -= 1

    def _weigh(self, checkpoint: Checkpoint) -> int:
        return self._weights.of(checkpoint.length)

    def _exported_room(
        self, newcomer: Checkpoint, leaving: Sequence[Checkpoint]
    ) -> tuple[Checkpoint, ...] | None:
        """Return what leaves host memory for a newcomer, None if it is not worth it."""
        gone_already = [c for c in leaving if c.sequence is None]

        def enough(victims: Sequence[Checkpoint]) -> bool:
            return self._fits_exported(newcomer, [*gone_already, *victims])

        if enough(()):
            return ()
        candidates = [
            c
            for c in leaving_order(self.book.exported(), self.book.standing)
            if not c.leases and c not in leaving
        ]
        if newcomer in self.book.checkpoints:  # else it is the latest thing said, which stays
            rank = self.book.standing(newcomer).rank()
            candidates = [c for c in candidates if self.book.standing(c).rank() < rank]
        return fewest(candidates, enough)

    def _fits_exported(self, newcomer: Checkpoint | None, gone: Sequence[Checkpoint]) -> bool:
        n_bytes = self.exported_bytes - sum(c.n_bytes for c in gone)
        tokens = self.exported_tokens - sum(c.length for c in gone)
        if newcomer is not None:
            n_bytes += self._weigh(newcomer)
            tokens += newcomer.length
        most = self.budgets.exported_tokens
        return n_bytes <= self.budgets.exported_bytes and (most is None or tokens <= most)

    # ---- leaving ------------------------------------------------------------------------------

    def plan_room(self, cells: int) -> tuple[Checkpoint, ...] | None:
        """Return what to evict so that `cells` are free, None if that cannot be had."""
        return self._room(cells=cells)

    def plan_shrink(self) -> tuple[Checkpoint, ...]:
        """Return what leaves host memory so that the exported budgets hold."""
        if self._fits_exported(None, ()):
            return ()
        order = leaving_order(self.book.exported(), self.book.standing)
        candidates = [c for c in order if not c.leases]
        found = fewest(candidates, lambda victims: self._fits_exported(None, victims))
        return tuple(candidates) if found is None else found

    def drop(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint's state was cleared, or taken over by a lane."""
        if checkpoint in self._moving:
            self.stayed(checkpoint)
        self.book.drop(checkpoint)
        if checkpoint.sequence is not None:
            self._free.add(checkpoint.sequence)

    def branch(self, conversation: Conversation, other: Conversation) -> None:
        """Note that another chat goes on from where a conversation stands."""
        for checkpoint in self.book.of(conversation):
            if not checkpoint.is_superseded:
                checkpoint.users.add(other)

    def plan_forget(self, conversation: Conversation) -> tuple[Checkpoint, ...]:
        """Return what nobody needs once a conversation is over; it is no user of the rest."""
        used = [c for c in self.checkpoints if conversation in c.users]
        for checkpoint in used:
            checkpoint.users.discard(conversation)
        return tuple(c for c in used if not c.users)

    def lose(self) -> tuple[Checkpoint, ...]:
        """Note that every sequence was emptied; return what is gone. Host memory stays."""
        lost = tuple(self.book.resident())
        for checkpoint in lost:
            self.drop(checkpoint)
        self._free |= self._lanes
        self._lanes.clear()
        self._arriving.clear()
        self._saving.clear()
        for checkpoint in self.checkpoints:
            checkpoint.leases = 0
        return lost

    # ---- how it is decided --------------------------------------------------------------------

    def _room_for_lane(
        self, claim: Claim, seed: Seed | None
    ) -> tuple[int, tuple[Checkpoint, ...]] | None:
        """Return a sequence for a lane and what leaves for it, if need be the seed's own."""
        holder = [seed.checkpoint] if seed else []
        shared = seed.length if seed and seed.checkpoint.sequence is not None else 0
        cells = claim.length - shared + claim.reserve
        if seed and not shared:  # an import brings all its rows, also those that are cut again
            cells += seed.checkpoint.length - seed.length
        room = self._room(cells=cells, sequences=1, protected=holder)
        if room is not None:
            return self._pick_lane(room), room
        if seed is None or seed.checkpoint.sequence is None or seed.checkpoint.leases > 0:
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
        """Return the victims, besides those `leaving` anyway, that make the room asked for.

        Within the resident budget if that can be; else all that can leave does, so that the
        budget is passed by lanes alone. Cells that imports have yet to fill are taken already.
        """
        n_most = None if self._ledger.free is None else self.budgets.resident_cells
        due = sum(n - self._ledger.length(lane) for lane, n in self._arriving.items())

        def enough(victims: Sequence[Checkpoint], within: int | None = n_most) -> bool:
            gone = [c.sequence for c in (*leaving, *victims) if c.sequence is not None]
            if len(self._free) + len(gone) < sequences:
                return False
            more = cells + due - self._ledger.freed_by(gone)
            return self._ledger.fits(more) and (
                within is None or self._ledger.used + more <= within
            )

        if enough(()):
            return ()
        leaving_anyway = [c for c in self._moving if c not in protected and c not in leaving]
        staying = (
            c
            for c in leaving_order(self.book.resident(), self.book.standing)
            if not c.leases and c not in protected and c not in leaving
        )
        candidates = [*leaving_anyway, *staying]
        room = fewest(candidates, enough)
        if room is None and n_most is not None and enough(candidates, None):
            return tuple(candidates)
        return room

    def _dearer(self, admission: Admission, kind: Kind) -> list[Checkpoint]:
        """Return what a new checkpoint of this kind is not worth evicting: chats' next turns.

        Where the conversation has a turn checkpoint, a resend point saves a few tokens more.
        Where it has none, it saves the whole prompt. A shared prefix can be read again for many.
        """
        latest = self.book.latest
        if kind == "turn" or (kind == "resend" and admission.conversation not in latest):
            return []
        return list(latest.values())

    def _overflow(self, admission: Admission) -> list[Checkpoint]:
        """Return what of its chat leaves once this turn keeps a checkpoint of its own."""
        outdated = self.book.outdated(admission.conversation, admission.serial)
        lasting = [c for c in outdated if c.kind in ("turn", "reply") and c.sequence is not None]
        lasting.extend(
            c
            for c in self.book.resident()
            if c.is_superseded and c.conversation != admission.conversation
        )
        lasting.sort(key=lambda c: c.tick)
        beyond = set(lasting[: max(0, len(lasting) - self.budgets.history)])
        passing = set(outdated).difference(lasting)
        return [c for c in self.checkpoints if (c in beyond or c in passing) and not c.leases]

    def _pick_lane(self, leaving: Iterable[Checkpoint]) -> int:
        """Return the lowest sequence that is free once `leaving` are gone."""
        return min(self._freed_with(leaving))

    def _pick_spare(self, leaving: Iterable[Checkpoint]) -> int:
        """Return the sequence for a checkpoint: the highest, out of the lanes' way."""
        return max(self._freed_with(leaving))

    def _spare_for(self, sequence: int) -> int:
        """Return where the state of an ending lane is to stand, usually where it is."""
        spare = max(self._free, default=sequence) if self._low_lanes else sequence
        return max(spare, sequence)

    def _freed_with(self, leaving: Iterable[Checkpoint]) -> set[int]:
        return self._free.union(c.sequence for c in leaving if c.sequence is not None)

    def _checkpoint(
        self, sequence: int | None, path: bytes, kind: Kind, admission: Admission
    ) -> Checkpoint:
        length = len(path) // TOKEN_WIDTH
        return Checkpoint(path, length, kind, admission.conversation, admission.serial, sequence)
