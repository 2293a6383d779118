"""Where does a reply end when the caller named strings to stop at?

At the stop string that is complete first; of two completed by the same character, the longer one
counts. A reply thus ends as early as it can be known to end, and the answer does not depend on how
the text was cut into tokens. Of the stop string itself nothing is ever emitted; what may be
the beginning of one is held back until it is decided.

Invariant: emitted + held back = text fed so far, up to the stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InvalidArgument
from orchestrator.text.literals import begun_length

MAX_STOPS = 64
MAX_STOP_LENGTH = 512  # characters


class StopStrings:
    """Watches the text of one reply.

    Attribute `matched`: the stop string found, or None. Raises InvalidArgument for an empty or
    overlong stop string, and for too many of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        _check(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next text; returns what may be shown now and whether the reply ends here.

        After a stop nothing more is shown: ``("", True)`` for whatever is fed.
        """
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = self._first(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start], True
        shown = len(text) - begun_length(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string, at the end of the reply."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the stop string that ends first in `text`; the longest of those."""
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None


def _check(stops: Sequence[str]) -> None:
    if isinstance(stops, str):
        raise InvalidArgument("stop strings are a list; put the one string into a list")
    if isinstance(stops, bytes) or not isinstance(stops, Sequence):
        raise InvalidArgument(f"stop is {stops!r}; give a list of texts, an empty one for none")
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(f"{len(stops)} stop strings given, at most {MAX_STOPS} are watched")
    for stop in stops:
        if not isinstance(stop, str):
            raise InvalidArgument(f"a stop string is {stop!r}; give texts")
        if not stop:
            raise InvalidArgument("a stop string is empty and would stop at once; leave it out")
        if len(stop) > MAX_STOP_LENGTH:
            raise InvalidArgument(
                f"a stop string has {len(stop):,} characters, the limit is {MAX_STOP_LENGTH:,}; "
                "its first line is usually enough"
            )
