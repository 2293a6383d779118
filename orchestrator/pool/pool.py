"""Which checkpoints are kept, what does a request start from, and what makes room?

The pool decides and remembers; it carries nothing out. Every decision is a frozen plan made whole
before anything changes, and the engine reports back what it did:

    plan_admission ─▶ Admission ─▶ (evict, copy or import)       ─▶ admitted
    plan_keep      ─▶ Keep      ─▶ (evict, copy or save)         ─▶ kept
    plan_release   ─▶ Release   ─▶ (evict, clear, cut or save)   ─▶ released
    plan_fold      ─▶ Fold      ─▶ (save the state)              ─▶ folded
    plan_export    ─▶ Export    ─▶ exporting, (move)             ─▶ exported

Every sequence is free or a holder's: a lane's, or one that keeps rows for checkpoints. Where a
recurrent state can be kept apart from its rows (`snapshots`), a lane's own rows and those of a
holder serve all snapshots along them; elsewhere a holder has one checkpoint, which is whole. The
pool knows no llama.cpp: it sees cells through a `Ledger`, sequences as numbers and bytes as
estimates that are never too small.

Invariants: a snapshot is entered in the holder whose rows are its own; lanes and resident
holders take no more cells than the resident budget while there is a checkpoint that could leave;
what lies in host memory, and what is on its way there, fits its budgets; what a lease holds stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import InvalidArgument
from orchestrator.pool.book import Book, Seed
from orchestrator.pool.checkpoint import Checkpoint, Conversation, Holder, Kind, Stop
from orchestrator.pool.eviction import OF_ONE_TURN, SHARED, Rank, fewest, leaving_order
from orchestrator.pool.ledger import Ledger
from orchestrator.pool.placement import place
from orchestrator.pool.plans import (
    TOKEN_WIDTH,
    Admission,
    Budgets,
    Claim,
    Export,
    Fold,
    Keep,
    Release,
    Weights,
)

EXPORT_LEAST = 16
"""Tokens that a checkpoint must save to be moved to host memory and back rather than read again.

The demo model breaks even at about 4 (`tests/bench_tiers.py` prints it for any model); host memory
is worth more than that.
"""


@dataclass(frozen=True, slots=True)
class Forms:
    """How checkpoints can be kept.

    `divisible`: rows can be cut anywhere (attention only). `resident` False: sequences are for
    lanes alone and every checkpoint is exported at once. `low_lanes` keeps lanes on low sequence
    ids, which pure recurrent memory decodes together. `snapshots`: a recurrent state can be kept
    apart from its rows; `stateful`: there are no rows (pure recurrent memory). `spares_first`: a
    free sequence is taken before a state is saved, since copying one moves no data; with several
    lanes it would scatter their cells.
    """

    divisible: bool = False
    resident: bool = True
    low_lanes: bool = False
    snapshots: bool = False
    stateful: bool = False
    spares_first: bool = True


_CHANCE = 4
"""Tokens that two requests may have in common by chance after the head they share."""

_GROUPS: dict[Kind, int] = {
    "message": SHARED,
    "anchor": SHARED,
    "shared": SHARED,
    "system": SHARED,
    "mark": SHARED,
}

_N_NEEDED = 4  # turn, base, branch and resend, of every prompt


class Pool:
    """The checkpoints of `n_sequences` sequences; see the module's head."""

    def __init__(
        self,
        n_sequences: int,
        ledger: Ledger,
        *,
        forms: Forms,
        budgets: Budgets | None = None,
        weights: Weights | None = None,
    ) -> None:
        if n_sequences < 1:
            raise InvalidArgument(f"a pool of {n_sequences} sequences cannot be; give at least 1")
        self.book = Book(divisible=forms.divisible)
        self.budgets = budgets or Budgets()
        self.forms = forms
        self._weights = weights or Weights()
        self._ledger = ledger
        self._n_sequences = n_sequences
        self._free = set(range(n_sequences))
        self._lanes: dict[int, Holder] = {}
        self._moving: dict[Holder, int] = {}  # bytes reserved for what is on its way out
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
    def moving(self) -> tuple[Holder, ...]:
        """Holders on their way to host memory."""
        return tuple(self._moving)

    @property
    def exported_bytes(self) -> int:
        """Host memory of snapshots and of what is exported, or still on its way out."""
        under_way = sum(self._moving.values()) + sum(self._saving.values())
        return self.book.exported_bytes + under_way

    @property
    def exported_tokens(self) -> int:
        """Tokens whose rows lie in host memory, or are still on their way out."""
        moving = sum(holder.length for holder in self._moving)
        return self.book.exported_tokens + moving + sum(c.length for c in self._saving)

    def lane(self, sequence: int) -> Holder:
        """Return the holder of a running lane."""
        return self._lanes[sequence]

    # ---- admission ----------------------------------------------------------------------------

    def plan_admission(self, claim: Claim) -> Admission | None:
        """Return how a request gets a lane, None while there is no room for it."""
        seed = self.book.longest(claim.path) if claim.reuses else claim.own
        room = self._room_for_lane(claim, seed)
        if room is None:
            return None
        sequence, evicted = room
        stops = self._stops(claim, seed.length if seed else 0)
        return Admission(
            *(sequence, seed, evicted, stops, self._chat(claim, seed), self._serial, claim.keeps),
            turn=self._turn_of(claim),
            has_turn=claim.turn > 0,
            trunk=claim.path,
            overrun=self._overrun(seed, sequence),
        )

    def _stops(self, claim: Claim, seeded: int) -> tuple[Stop, ...]:
        """Return where a prefill keeps states; without a history budget none for going back."""
        if not claim.keeps:
            return ()
        wayside = self.n_wayside
        costs = replace(claim.costs, n_states=_N_NEEDED + len(claim.marks) + wayside)
        points = replace(claim.points, branch=_branch(claim))
        points = points if wayside else replace(points, starts=())
        stops = place(points, seeded, costs, divisible=self.forms.divisible)
        return stops if wayside else tuple(s for s in stops if s.kind != "anchor")

    @property
    def state_bytes(self) -> int:
        """Bytes of host memory that a recurrent state takes at most."""
        return self._weights.state

    @property
    def keeps_in_replies(self) -> bool:
        """Whether a state inside a reply can be kept without a sequence."""
        return (self.forms.snapshots or self.forms.stateful) and self.n_wayside > 0

    @property
    def n_wayside(self) -> int:
        """How many states may be kept for going back: in host memory, else in sequences."""
        if not self.forms.resident:
            return 0
        if self.forms.snapshots or self.forms.stateful:
            room = self.budgets.exported_bytes // max(1, self._weights.state)
        else:
            room = self._n_sequences - len(self._lanes) - 2
        return max(0, min(self.budgets.history, room))

    def admitted(self, admission: Admission) -> None:
        """Note that an admission was carried out; what it evicted or overran is gone already."""
        self._serial += 1
        seed, sequence = admission.seed, admission.sequence
        if seed is not None and 2 * seed.length >= seed.checkpoint.length:
            self.book.touch(seed.checkpoint)  # a use counts only if it took a real part
            seed.checkpoint.users.add(admission.conversation)
        if admission.turn is not None:
            admission.turn.users.add(admission.conversation)
        if admission.takes_over and seed is not None:
            holder = seed.checkpoint.holder
            holder.is_lane = holder.is_whole = True
            holder.trunk = admission.trunk
            if seed.checkpoint.is_live:
                self.drop(seed.checkpoint)
        else:
            holder = Holder(sequence, admission.trunk, is_lane=True)
            self._free.remove(sequence)
        if seed is not None and seed.checkpoint.sequence is None:
            self._arriving[sequence] = self._brought(seed)
        self._lanes[sequence] = holder

    def arrived(self, admission: Admission) -> None:
        """Note that an import is over: the lane holds its seed, or nothing."""
        self._arriving.pop(admission.sequence, None)

    def _brought(self, seed: Seed) -> int:
        """Return the rows that importing a seed brings, some of which are cut again."""
        return self._weights.brought(seed.checkpoint.length, seed.checkpoint.holder.length)

    def _overrun(self, seed: Seed | None, sequence: int) -> tuple[Checkpoint, ...]:
        """Return what a lane that takes its seed's holder over runs over."""
        if seed is None or seed.checkpoint.sequence != sequence:
            return ()
        beyond = seed.checkpoint.holder.checkpoints
        return tuple(c for c in beyond if c.length > seed.checkpoint.length)

    def _turn_of(self, claim: Claim) -> Checkpoint | None:
        """Return the checkpoint that the next turn of a claim's chat will start from."""
        if not (claim.turn and claim.keeps):
            return None
        reached = self.book.at(claim.path[: claim.turn * TOKEN_WIDTH])
        return next((c for c in reached if c.length == claim.turn), None)

    def _chat(self, claim: Claim, seed: Seed | None) -> Conversation:
        """Return whose turn this is: by name, else by the prefix it goes on from.

        Who goes on from what a chat has gone past is another chat; both go on from there.
        """
        if claim.conversation is not None:
            return claim.conversation
        if seed is None or seed.checkpoint.is_common or seed.checkpoint.is_superseded:
            return self._serial
        return seed.checkpoint.conversation

    # ---- keeping ------------------------------------------------------------------------------

    def plan_keep(self, admission: Admission, path: bytes, kind: Kind) -> Keep | None:
        """Return how the state of a lane at the packed `path` is kept, None if it cannot be."""
        if not admission.keeps or self.book.serves(path):
            return None
        leaving = self._overflow(admission, path) if kind == "turn" else []
        for form in self._by_cost(kind):
            plan = form(admission, path, kind, leaving)
            if plan is not None:
                return plan
        return None

    def _by_cost(self, kind: Kind) -> list[_Form]:
        """Return the ways to keep a state, the cheapest first."""
        spare, saved, apart = self._keep_spare, self._keep_exported, self._keep_snapshot
        forms = self.forms
        if not forms.resident:
            return [saved]
        is_at_hand = bool(self._free) and kind in ("turn", "resend")
        if forms.snapshots or forms.stateful:
            cheap: _Form = apart if forms.snapshots else saved
            if kind in ("reply", "message", "anchor"):  # never worth a sequence
                return [cheap]
            newest = forms.stateful and kind == "turn"  # the others make way for it
            if newest or (is_at_hand and forms.spares_first):
                return [spare, cheap, saved]
            return [cheap, spare, saved]
        return [] if kind == "reply" else [spare, saved]

    def _keep_snapshot(
        self, admission: Admission, path: bytes, kind: Kind, leaving: Sequence[Checkpoint]
    ) -> Keep | None:
        """Return how a state is kept on the rows of its lane, None if there is no room for it."""
        holder = self._lanes[admission.sequence]
        checkpoint = self._checkpoint(holder, path, kind, admission, is_live=False)
        checkpoint.n_bytes = self._weights.state
        room = self._host_room(checkpoint.n_bytes, 0, leaving, self._most(checkpoint))
        return None if room is None else Keep(checkpoint, dropped=(*leaving, *room))

    def _most(self, checkpoint: Checkpoint) -> Rank | None:
        """Return below what rank others may leave for a new checkpoint, None for anything.

        Where a conversation has a turn checkpoint, a resend point saves a few tokens more. Where
        it has none, it saves the whole prompt.
        """
        kind, below = checkpoint.kind, self.book.within(checkpoint.path)
        has_turn = checkpoint.conversation in self.book.latest
        if kind in ("turn", "partial") or (kind == "resend" and not has_turn):
            return None
        if not self.forms.resident and kind in ("resend", "reply"):
            return None  # the latest thing said, and nowhere else to go
        replay = checkpoint.length - max((c.length for c in below), default=0)
        return _GROUPS.get(kind, OF_ONE_TURN), float(replay), 0

    def _keep_spare(
        self, admission: Admission, path: bytes, kind: Kind, leaving: Sequence[Checkpoint]
    ) -> Keep | None:
        """Return how a lane is copied to a sequence of its own, None if none is to be had."""
        spare = Holder(None, path)
        checkpoint = self._checkpoint(spare, path, kind, admission)
        room = self._room(sequences=1, leaving=leaving, most=self._most(checkpoint))
        if room is None:
            return None
        spare.sequence = self._pick_spare([*room, *leaving])
        return Keep(checkpoint, evicted=room, dropped=tuple(leaving))

    def _keep_exported(
        self, admission: Admission, path: bytes, kind: Kind, leaving: Sequence[Checkpoint]
    ) -> Keep | None:
        """Return how a state is saved to host memory at once, None if it is not worth it."""
        if self.forms.resident and not self.forms.stateful and kind not in ("turn", "shared"):
            return None
        length = len(path) // TOKEN_WIDTH
        n_bytes = self._weights.of(length)
        checkpoint = self._checkpoint(Holder(None, path), path, kind, admission, is_live=False)
        checkpoint.n_bytes = n_bytes
        room = self._host_room(n_bytes, length, leaving, self._most(checkpoint))
        if room is None:
            return None
        return Keep(checkpoint, dropped=(*leaving, *room))

    def inside_reply(self, admission: Admission, n_prompt: int) -> dict[int, Checkpoint]:
        """Return what a running request kept inside its reply, by length."""
        of_it = (c for c in self.book.of(admission.conversation) if c.serial == admission.serial)
        return {c.length: c for c in of_it if c.kind == "reply" and c.length > n_prompt}

    def saving(self, keep: Keep) -> None:
        """Note that a state is on its way from its lane to host memory, until `kept`."""
        self._saving[keep.checkpoint] = keep.checkpoint.n_bytes

    def unsaved(self, keep: Keep) -> None:
        """Note that a state on its way from its lane goes no further."""
        self._saving.pop(keep.checkpoint, None)

    def kept(self, keep: Keep, n_bytes: int = 0, row_bytes: int = 0) -> None:
        """Note that a checkpoint now stands where it was planned.

        Its state takes `n_bytes` of host memory, and its rows, where they are there, `row_bytes`.
        """
        checkpoint = keep.checkpoint
        self.unsaved(keep)
        checkpoint.n_bytes, holder = n_bytes, checkpoint.holder
        if not holder.is_lane:
            holder.length, holder.n_bytes = checkpoint.length, row_bytes
            if holder.sequence is not None:
                self._free.remove(holder.sequence)
        self._enter(checkpoint)

    # ---- a lane ends --------------------------------------------------------------------------

    def plan_release(self, admission: Admission, path: bytes, kind: Kind | None) -> Release:
        """Return what becomes of a lane that ends at `path`; `kind` None keeps nothing."""
        sequence = admission.sequence
        if kind is None or not admission.keeps or not path or self.book.serves(path):
            return Release(sequence, path, None)
        divisible = self.forms.divisible
        pointless = [c for c in self.book.within(path) if divisible and not c.is_held]
        named = isinstance(admission.conversation, str)  # else it may well be the only request
        heads = kind == "reply" and named and not admission.has_turn
        if heads:
            pointless += [c for c in self._overflow(admission, path) if c not in pointless]
        if not self.forms.resident:
            keep = self._keep_exported(admission, path, kind, pointless)
            if keep is None:
                return Release(sequence, path, None)
            return Release(sequence, path, keep.checkpoint, keep.dropped, heads)
        spare = self._spare_for(sequence)
        holder = self._lanes[sequence] if spare == sequence else Holder(spare, path)
        checkpoint = self._checkpoint(holder, path, kind, admission)
        return Release(sequence, path, checkpoint, tuple(pointless), heads)

    def released(self, release: Release, n_bytes: int = 0, row_bytes: int = 0) -> Holder:
        """Note that a lane ended; return what keeps its rows for its checkpoints, if it has any.

        `n_bytes` and `row_bytes` as in `kept`.
        """
        lane = self._lanes.pop(release.sequence)
        self._arriving.pop(release.sequence, None)
        lane.is_lane, lane.trunk = False, release.path
        checkpoint = release.checkpoint
        if checkpoint is not None:
            holder = checkpoint.holder
            if holder is not lane and holder.sequence is not None:
                self._free.remove(holder.sequence)
            for pointless in release.evicted if self.forms.divisible else ():
                checkpoint.users |= pointless.users  # whoever went on from it goes on from this
            checkpoint.n_bytes, holder.n_bytes = n_bytes, row_bytes
            holder.length = checkpoint.length
            self._enter(checkpoint)
            if release.heads:
                self.book.supersede(checkpoint)
        if not lane.checkpoints:
            self._free.add(release.sequence)
        lane.length = lane.longest()
        return lane

    def _enter(self, checkpoint: Checkpoint) -> None:
        self.book.add(checkpoint)
        checkpoint.users.add(checkpoint.conversation)
        if checkpoint.kind == "turn":
            self.book.supersede(checkpoint)

    def plan_history(self) -> tuple[Checkpoint, ...]:
        """Return the history that is beyond its budget, the least worth."""
        if sum(c.is_history for c in self.checkpoints) <= self.budgets.history:
            return ()
        old = self.book.history()
        beyond = max(0, len(old) - self.budgets.history)
        return tuple(c for c in old[:beyond] if not c.is_held)

    # ---- one sequence for each branch ---------------------------------------------------------

    def plan_merges(self, holder: Holder) -> list[tuple[Holder, Holder]]:
        """Return which stripped holders' checkpoints another one can take over: (from, to)."""
        if not self._may_merge(holder):
            return []
        merges = []
        for other in self._resident_holders():
            if other is holder or not self._may_merge(other):
                continue
            if not holder.is_whole and other.covers(holder.path, other.length):
                return [(holder, other)]
            if not other.is_whole and holder.covers(other.path, holder.length):
                merges.append((other, holder))
        return merges

    def merged(self, source: Holder, target: Holder) -> None:
        """Note that `target` keeps the rows of all that `source` did, whose sequence is free."""
        for checkpoint in list(source.checkpoints):
            self.book.move(checkpoint, target)
        if source.sequence is not None:
            self._free.add(source.sequence)

    def plan_fold(self, checkpoint: Checkpoint, shrinking: Collection[Holder]) -> Fold | None:
        """Return how a whole checkpoint becomes a snapshot on rows that stay anyway.

        Those of holders that are `shrinking` may not.
        """
        holder = checkpoint.holder
        alone = checkpoint.is_live and len(holder.checkpoints) == 1
        if not (self.forms.snapshots and alone) or holder.sequence is None or checkpoint.is_held:
            return None
        path = checkpoint.path
        others = [*self._resident_holders(), *self._lanes.values()]
        staying = (o for o in others if o is not holder and o not in shrinking)
        target = next((other for other in staying if self._keeps(other, path)), None)
        if target is None:
            return None
        most = self.book.standing(checkpoint).rank()
        room = self._host_room(self._weights.state, 0, (), most)
        if room is None or not (target.is_lane or target.longest({*room}) >= checkpoint.length):
            return None  # without those the rows would be cut
        return Fold(checkpoint, target, room)

    def folded(self, fold: Fold, n_bytes: int) -> None:
        """Note that a checkpoint's state was saved and its sequence cleared."""
        source = fold.checkpoint.holder
        self.book.save(fold.checkpoint, n_bytes, fold.holder)
        if source.sequence is not None:
            self._free.add(source.sequence)

    def _keeps(self, holder: Holder, path: bytes) -> bool:
        """Return whether a resident holder's rows include a path's, and will for a while."""
        if holder.sequence is None or holder in self._moving or holder.sequence in self._arriving:
            return False
        n_rows = self._ledger.length(holder.sequence) if holder.is_lane else holder.length
        return holder.covers(path, n_rows)

    def _may_merge(self, holder: Holder) -> bool:
        resident = holder.sequence is not None and not holder.is_lane
        return bool(holder.checkpoints) and resident and holder not in self._moving

    def _resident_holders(self) -> list[Holder]:
        """All holders in sequences where no lane runs."""
        holders = dict.fromkeys(c.holder for c in self.checkpoints)
        return [h for h in holders if h.sequence is not None and not h.is_lane]

    # ---- moving to host memory ----------------------------------------------------------------

    def plan_export(self, holder: Holder) -> Export | None:
        """Return how a resident holder moves to host memory, None if it should not.

        It should where the budgets allow it, where reading its tokens again would take longer
        than moving them, and where only what is worth less has to leave for it.
        """
        if holder.is_lane or holder in self._moving:
            return None
        if not any(map(self._is_worth_moving, holder.checkpoints)):
            return None
        live = any(c.is_live for c in holder.checkpoints)
        n_bytes = self._weights.rows(holder.length) + live * self._weights.state
        most = max(self.book.standing(c).rank() for c in holder.checkpoints)
        room = self._host_room(n_bytes, holder.length, (), most)
        return None if room is None else Export(holder, room, n_bytes)

    def _is_worth_moving(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.is_superseded and not checkpoint.is_history:
            return False
        return checkpoint.leases > 0 or self.book.standing(checkpoint).replay >= EXPORT_LEAST

    def exporting(self, export: Export) -> None:
        """Note that a holder is on its way out; it stays where it is until `exported`."""
        self._moving[export.holder] = export.n_bytes
        export.holder.leases += 1

    def exported(self, holder: Holder, n_bytes: int, row_bytes: int) -> None:
        """Note that a holder arrived in host memory and its sequence was cleared.

        `n_bytes` are those of the state that its sequence ended with, if it was whole.
        """
        self.stayed(holder)
        if holder.sequence is not None:
            self._free.add(holder.sequence)
        self.book.move_out(holder, row_bytes)
        for checkpoint in [c for c in holder.checkpoints if c.is_live]:
            self.book.save(checkpoint, n_bytes)
        holder.is_whole = False

    def stayed(self, holder: Holder) -> None:
        """Note that a holder on its way out goes no further."""
        del self._moving[holder]
        holder.leases -= 1

    def _host_room(
        self, n_bytes: int, tokens: int, leaving: Sequence[Checkpoint], most: Rank | None
    ) -> tuple[Checkpoint, ...] | None:
        """Return what leaves host memory so that more fits, None if that is not worth it.

        Only what ranks below `most` leaves, and nothing is below None's demand.
        """

        def enough(victims: Sequence[Checkpoint]) -> bool:
            return self._fits_host(n_bytes, tokens, [*leaving, *victims])

        if enough(()):
            return ()
        candidates = [
            c
            for c in leaving_order(self._in_host(), self.book.standing)
            if not c.is_held and c not in leaving
        ]
        if most is not None:
            candidates = [c for c in candidates if self.book.standing(c).rank() < most]
        return fewest(candidates, enough)

    def _in_host(self) -> Iterable[Checkpoint]:
        return (c for c in self.checkpoints if c.n_bytes or c.sequence is None)

    def _fits_host(self, n_bytes: int, tokens: int, gone: Sequence[Checkpoint]) -> bool:
        n_bytes += self.exported_bytes - sum(c.n_bytes for c in gone)
        tokens += self.exported_tokens
        for holder in _emptied(gone):
            if holder.sequence is None:
                n_bytes -= holder.n_bytes
                tokens -= holder.length
        most = self.budgets.exported_tokens
        return n_bytes <= self.budgets.exported_bytes and (most is None or tokens <= most)

    # ---- leaving ------------------------------------------------------------------------------

    def plan_room(self, cells: int) -> tuple[Checkpoint, ...] | None:
        """Return what to evict so that `cells` are free, None if that cannot be had."""
        return self._room(cells=cells)

    def plan_shrink(self) -> tuple[Checkpoint, ...]:
        """Return what leaves host memory so that its budgets hold."""
        if self._fits_host(0, 0, ()):
            return ()
        order = leaving_order(self._in_host(), self.book.standing)
        candidates = [c for c in order if not c.is_held]
        found = fewest(candidates, lambda victims: self._fits_host(0, 0, victims))
        return tuple(candidates) if found is None else found

    def drop(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint's state is gone, or taken over by a lane."""
        holder = checkpoint.holder
        self.book.drop(checkpoint)
        if holder.checkpoints or holder.is_lane:
            return
        if holder in self._moving:
            self.stayed(holder)
        if holder.sequence is not None:
            self._free.add(holder.sequence)

    def trim(self, holder: Holder, row_bytes: int) -> None:
        """Note that an exported holder's rows are those that its checkpoints need."""
        length = self._weights.brought(holder.longest(), holder.length)
        self.book.trim(holder, length, row_bytes)

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
        for holder in self._lanes.values():
            holder.is_lane = False
            if not holder.checkpoints and holder.sequence is not None:
                self._free.add(holder.sequence)
        self._lanes.clear()
        self._arriving.clear()
        self._saving.clear()
        lost = tuple(self.book.resident())
        for checkpoint in lost:
            self.drop(checkpoint)
        for checkpoint in self.checkpoints:
            checkpoint.leases = 0
        return lost

    # ---- how it is decided --------------------------------------------------------------------

    def _room_for_lane(
        self, claim: Claim, seed: Seed | None
    ) -> tuple[int, tuple[Checkpoint, ...]] | None:
        """Return a sequence for a lane and what leaves for it, if need be the seed's own."""
        kept = [seed.checkpoint] if seed else []
        shared = seed.length if seed and seed.checkpoint.sequence is not None else 0
        cells = claim.length - shared + claim.reserve
        if seed and not shared:  # an import brings whole slices of rows, parts of which are cut
            cells += self._brought(seed) - seed.length
        room = self._room(cells=cells, sequences=1, protected=kept)
        if room is not None:
            return self._pick_lane(room), room
        if seed is None or not self._may_take_over(seed):
            return None
        holder = seed.checkpoint.holder
        spare = 0
        if self.forms.divisible or self.forms.snapshots:
            spare = holder.length - seed.length
        room = self._room(cells=cells - spare, protected=[*holder.checkpoints])
        return None if room is None or holder.sequence is None else (holder.sequence, room)

    def _may_take_over(self, seed: Seed) -> bool:
        holder = seed.checkpoint.holder
        if holder.sequence is None or holder.is_lane or holder.leases:
            return False
        over = [c for c in holder.checkpoints if c.length > seed.checkpoint.length]
        return not any(c.leases for c in (seed.checkpoint, *over))

    def _room(
        self,
        *,
        cells: int = 0,
        sequences: int = 0,
        protected: Collection[Checkpoint] = (),
        leaving: Sequence[Checkpoint] = (),
        most: Rank | None = None,
    ) -> tuple[Checkpoint, ...] | None:
        """Return the victims, besides those `leaving` anyway, that make the room asked for.

        Only what ranks below `most` is one.

        Within the resident budget if that can be; else all that can leave does, so that the
        budget is passed by lanes alone. Cells that imports have yet to fill are taken already.
        """
        n_most = None if self._ledger.free is None else self.budgets.resident_cells
        due = sum(n - self._ledger.length(lane) for lane, n in self._arriving.items())

        def enough(victims: Sequence[Checkpoint], within: int | None = n_most) -> bool:
            lengths = self._lengths_without((*leaving, *victims))
            gone = sum(length == 0 for length in lengths.values())
            if len(self._free) + gone < sequences:
                return False
            more = cells + due - self._ledger.freed_by_cutting(lengths)
            return self._ledger.fits(more) and (
                within is None or self._ledger.used + more <= within
            )

        if enough(()):
            return ()
        candidates = self._leaving_candidates({*protected, *leaving}, most)
        room = fewest(candidates, enough)
        if room is None and n_most is not None and enough(candidates, None):
            return tuple(candidates)
        return room

    def _leaving_candidates(
        self, staying: Collection[Checkpoint], most: Rank | None
    ) -> list[Checkpoint]:
        """Return what may leave its sequence: first what is on its way out, then the least."""
        movable = [
            c for c in self.book.resident() if not (c.holder.is_lane or c.leases or c in staying)
        ]
        anyway = [c for c in movable if c.holder in self._moving]
        rest = [c for c in movable if c.holder not in self._moving]
        if most is not None:
            rest = [c for c in rest if self.book.standing(c).rank() < most]
        return [*anyway, *leaving_order(rest, self.book.standing)]

    def _lengths_without(self, gone: Iterable[Checkpoint]) -> dict[int, int]:
        """Return to which length each sequence is cut once some checkpoints are gone."""
        without = frozenset(c for c in gone if not c.holder.is_lane)
        holders = dict.fromkeys(c.holder for c in without)
        return {h.sequence: h.longest(without) for h in holders if h.sequence is not None}

    def _overflow(self, admission: Admission, path: bytes) -> list[Checkpoint]:
        """Return what of its chat leaves once this turn keeps a checkpoint of its own."""
        outdated = self.book.outdated(admission.conversation, admission.serial, path)
        lasting = [c for c in outdated if c.kind in ("turn", "reply")]
        lasting.extend(
            c
            for c in self.checkpoints
            if c.is_superseded and c.conversation != admission.conversation
        )
        lasting.sort(key=lambda c: (c.serial, c.tick))
        beyond = set(lasting[: max(0, len(lasting) - self.budgets.history)])
        passing = set(outdated).difference(lasting)
        return [c for c in self.checkpoints if (c in beyond or c in passing) and not c.is_held]

    def _pick_lane(self, leaving: Iterable[Checkpoint]) -> int:
        """Return the lowest sequence that is free once `leaving` are gone."""
        return min(self._freed_with(leaving))

    def _pick_spare(self, leaving: Iterable[Checkpoint]) -> int:
        """Return the sequence for a checkpoint: the highest, out of the lanes' way."""
        return max(self._freed_with(leaving))

    def _spare_for(self, sequence: int) -> int:
        """Return where the state of an ending lane is to stand, usually where it is."""
        spare = max(self._free, default=sequence) if self.forms.low_lanes else sequence
        return max(spare, sequence)

    def _freed_with(self, leaving: Iterable[Checkpoint]) -> set[int]:
        lengths = self._lengths_without(leaving)
        return self._free.union(s for s, length in lengths.items() if length == 0)

    def _checkpoint(
        self,
        holder: Holder,
        path: bytes,
        kind: Kind,
        admission: Admission,
        *,
        is_live: bool = True,
    ) -> Checkpoint:
        """Return a new checkpoint; on the way of a prompt it shares the prompt's bytes."""
        length = len(path) // TOKEN_WIDTH
        trunk = admission.trunk if admission.trunk.startswith(path) else path
        chat, serial = admission.conversation, admission.serial
        return Checkpoint(trunk, length, kind, chat, serial, holder, is_live)


_Form = Callable[[Admission, bytes, Kind, Sequence[Checkpoint]], Keep | None]


def _branch(claim: Claim) -> int:
    """Return where a prompt is taken to leave the path seen before.

    Requests that share a head often have the first token after it in common by chance ("What …"),
    so it is where a message or the system block ends just before, else a few tokens earlier.
    """
    known = [p for p in (claim.base, *claim.starts) if claim.branch - _CHANCE <= p <= claim.branch]
    return max(known, default=max(0, claim.branch - _CHANCE))


def _emptied(gone: Sequence[Checkpoint]) -> list[Holder]:
    """Return the holders that keep nothing once some checkpoints are gone."""
    without = frozenset(gone)
    holders = dict.fromkeys(c.holder for c in gone)
    return [h for h in holders if h.checkpoints.keys() <= without]
