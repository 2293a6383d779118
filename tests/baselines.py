"""What would other ways of giving up checkpoints have cost on a trace?

Two engines on paper play the recorded paths one after another, under the rules of memory that
cannot be cut: a prompt starts at the deepest kept state that is a strict prefix of it, and a state
can be kept only where it was passed. A state costs its bytes and those rows that no other kept
state's path has already; the rows of the request that runs count as well.

    lru       keeps where input and reply end, and gives up what was used longest ago; `messages`:
              keeps also where inputs begin and one token before the prompt ends, so that what
              is left between it and the oracle is what was given up wrongly
    oracle    knows the trace: keeps where later prompts part from this one, and gives up what
              saves least per byte and step until its next use, or is used last; the best of
              several such rules counts, so it is a bound from above on the best there is

Both are told in tokens prefilled. Neither knows queues and lanes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from traces import CELL_BYTES, STATE_BYTES, Step, Trace, Trie


@dataclass(frozen=True, slots=True)
class Path:
    """The nodes of one step, its prompt's first; lengths where input and messages part."""

    nodes: tuple[int, ...]
    n_prompt: int
    turn: int
    starts: tuple[int, ...]
    keeps: bool

    def at(self, length: int) -> int:
        """Return the node where its first `length` tokens end."""
        return self.nodes[length - 1]


class Map:
    """All places of a trace: nodes of its trie, with parent and depth."""

    def __init__(self, trace: Trace) -> None:
        trie = Trie()
        self.paths = [_path(trie, step) for step in trace.steps]
        self.parent = [0] * (len(trie) + 1)
        self.depth = [0] * (len(trie) + 1)
        for path in self.paths:
            for depth, node in enumerate(path.nodes, start=1):
                self.parent[node] = path.nodes[depth - 2] if depth > 1 else 0
                self.depth[node] = depth


def _path(trie: Trie, step: Step) -> Path:
    nodes, asked = tuple(trie.grow(step.fed)), step.request
    return Path(nodes, len(asked.tokens), asked.turn, asked.starts, not asked.one_off)


class Store:
    """Kept states and the rows on their paths, in bytes."""

    def __init__(self, places: Map) -> None:
        self.kept: set[int] = set()
        self.n_rows = 0
        self._users = [0] * len(places.parent)  # how many kept states' paths a row is on
        self._parent = places.parent

    @property
    def n_bytes(self) -> int:
        """What all of it takes."""
        return self.n_rows * CELL_BYTES + len(self.kept) * STATE_BYTES

    def keep(self, node: int) -> None:
        """Keep a state, with its rows."""
        if node not in self.kept:
            self.kept.add(node)
            self._count(node, 1)

    def give_up(self, node: int) -> None:
        """Give a state up, and the rows that were there for it alone."""
        self.kept.remove(node)
        self._count(node, -1)

    def missing(self, nodes: Sequence[int]) -> int:
        """Return how many rows of a path are not there."""
        return len(nodes) - bisect_left(nodes, True, key=lambda node: not self._users[node])

    def freed(self, node: int) -> int:
        """Return the bytes that giving a state up would free."""
        n_rows = 0
        while node and self._users[node] == 1:
            n_rows += 1
            node = self._parent[node]
        return n_rows * CELL_BYTES + STATE_BYTES

    def _count(self, node: int, change: int) -> None:
        while node:
            was, self._users[node] = self._users[node], self._users[node] + change
            self.n_rows += (was == 0) - (self._users[node] == 0)
            node = self._parent[node]


class Policy(Protocol):
    """Where states are kept, and which leaves first; it is told of every step that is over."""

    def points(self, number: int) -> Iterable[int]:
        """Return where along the path of a step states are wanted."""
        ...

    def used(self, number: int, nodes: Iterable[int]) -> None:
        """Note that a step kept states or started from one."""
        ...

    def first_to_leave(self, number: int, store: Store) -> int:
        """Return the kept state that is worth least once a step is over."""
        ...


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it: tokens prefilled, and the most that was kept between two steps."""

    prefilled: int
    n_rows: int
    n_states: int
    n_bytes: int


def play_on_paper(places: Map, policy: Policy, capacity: int | None = None) -> Played:
    """Play a trace with so many bytes (None: any number of them)."""
    store = Store(places)
    prefilled = n_rows = n_states = n_bytes = 0

    def fit(number: int, running: Sequence[int]) -> None:
        while capacity is not None and store.kept:
            if store.n_bytes + store.missing(running) * CELL_BYTES <= capacity:
                return
            store.give_up(policy.first_to_leave(number, store))

    for number, path in enumerate(places.paths):
        seed = _seed(path, store)
        if seed:
            policy.used(number, [path.at(seed)])
        prefilled += path.n_prompt - seed
        if path.keeps:
            passed = [n for n in policy.points(number) if places.depth[n] > seed]
            for node in passed:
                store.keep(node)
            policy.used(number, passed)
        fit(number, path.nodes)
        fit(number, ())
        n_rows, n_states = max(n_rows, store.n_rows), max(n_states, len(store.kept))
        n_bytes = max(n_bytes, store.n_bytes)
    return Played(prefilled, n_rows, n_states, n_bytes)


def _seed(path: Path, store: Store) -> int:
    """Return the length of the longest kept strict prefix of a prompt."""
    for length in range(path.n_prompt - 1, 0, -1):
        if path.at(length) in store.kept:
            return length
    return 0


# ---- least recently used ------------------------------------------------------------------------


class LeastRecent:
    """Keeps two states of each request, or more, and gives up the one used longest ago."""

    def __init__(self, places: Map, *, messages: bool) -> None:
        self._paths = places.paths
        self._messages = messages
        self._ticks: dict[int, int] = {}
        self._tick = 0

    def points(self, number: int) -> Iterable[int]:
        """See `Policy`."""
        path = self._paths[number]
        lengths = [path.turn, len(path.nodes)]
        if self._messages:
            lengths += [*path.starts, path.n_prompt - 1]
        return [path.at(length) for length in lengths if length]

    def used(self, number: int, nodes: Iterable[int]) -> None:
        """See `Policy`."""
        for node in nodes:
            self._tick += 1
            self._ticks[node] = self._tick

    def first_to_leave(self, number: int, store: Store) -> int:
        """See `Policy`."""
        return min(store.kept, key=lambda node: self._ticks[node])


def lru(places: Map, capacity: int | None = None, *, messages: bool = False) -> Played:
    """Return what least recent use comes to."""
    return play_on_paper(places, LeastRecent(places, messages=messages), capacity)


# ---- with knowledge of what comes ---------------------------------------------------------------


@dataclass(slots=True)
class Worth:
    """Of a kept state: steps until it is next started from, tokens saved then, bytes it takes."""

    wait: int
    saved: int
    freed: int


Rule = Callable[[Worth], float]

RULES: tuple[Rule, ...] = (
    lambda worth: -worth.wait,
    lambda worth: worth.saved / worth.wait,
    lambda worth: worth.saved / worth.freed,
    lambda worth: worth.saved / (worth.freed * worth.wait),
)


class Clairvoyant:
    """Keeps what later steps will start from; the lowest by `rule` leaves first."""

    def __init__(self, places: Map, rule: Rule) -> None:
        self._paths = places.paths
        self._depth = places.depth
        self._rule = rule
        self._along = _meetings(places)

    def points(self, number: int) -> Iterable[int]:
        """See `Policy`."""
        path = set(self._paths[number].nodes)
        return sorted({n for later in self._along[number + 1 :] for n in later if n in path})

    def used(self, number: int, nodes: Iterable[int]) -> None:
        """Nothing to be noted: what comes is known."""

    def first_to_leave(self, number: int, store: Store) -> int:
        """See `Policy`."""
        waits = dict(self._uses(number, store))
        useless = store.kept - waits.keys()
        if useless:
            return min(useless)

        def value(node: int) -> tuple[float, int]:
            wait, saved = waits[node]
            return self._rule(Worth(wait, saved, store.freed(node))), node

        return min(store.kept, key=value)

    def _uses(self, number: int, store: Store) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield for each kept state when it is started from next, and what that saves."""
        found: set[int] = set()
        for wait, meetings in enumerate(self._along[number + 1 :], start=1):
            there = [node for node in meetings if node in store.kept]
            if there and there[-1] not in found:
                before = self._depth[there[-2]] if len(there) > 1 else 0
                found.add(there[-1])
                yield there[-1], (wait, self._depth[there[-1]] - before)


def _meetings(places: Map) -> list[list[int]]:
    """Return, for each step, the nodes up to which its prompt runs along earlier paths."""
    met = []
    for number, path in enumerate(places.paths):
        lengths = {
            min(_common(path, earlier), path.n_prompt - 1) for earlier in places.paths[:number]
        }
        met.append([path.at(length) for length in sorted(lengths) if length])
    return met


def _common(path: Path, earlier: Path) -> int:
    """Return how many tokens of a prompt an earlier path shares."""
    most = min(path.n_prompt, len(earlier.nodes))
    return bisect_left(range(most), True, key=lambda n: path.nodes[n] != earlier.nodes[n])


def oracle(places: Map, capacity: int | None = None) -> Played:
    """Return what the best of the rules comes to that know the trace."""
    played = [play_on_paper(places, Clairvoyant(places, rule), capacity) for rule in RULES]
    return min(played, key=lambda each: each.prefilled)
