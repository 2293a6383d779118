"""What did the last requests take, in whatever process they ran?

A file of JSON lines in the state directory, for its user alone:

    requests.jsonl    the latest, one line each, appended in one write
    requests.1.jsonl  those before; the older file is dropped when the newer one is full

Several processes may append: a lock keeps their lines and the change of files apart. A process
that dies in the midst of a line leaves a damaged one behind, which the next line does not join and
readers skip and count. The engine's thread never waits for the disk: lines are written by another.

Invariants: both files together hold at most `N_BYTES_MOST`; every line but a damaged one is whole.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from orchestrator.engine.records import Record
from orchestrator.engine.request import Timings, Usage
from orchestrator.engine.why import Miss
from orchestrator.errors import ConfigError
from orchestrator.paths import state_dir, state_path

try:
    import fcntl
except ImportError:  # no such locks on this system: lines stay whole, some may be lost
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("orchestrator.store")

N_BYTES_MOST = 2 << 20
"""Some thousand requests."""

_NEWER, _OLDER = "requests.jsonl", "requests.1.jsonl"
_AT_MOST = 1e11  # seconds: some year that calendars still know
_PATIENCE = 2.0  # seconds that closing waits for a disk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """What one request of a model took."""

    model: str
    record: Record


@dataclass(frozen=True, slots=True)
class Journal:
    """The entries of a file, oldest first, and how many lines of it could not be read."""

    path: Path
    entries: tuple[Entry, ...]
    n_damaged: int


def journal_path() -> Path:
    """Return where entries are kept, whether there are any or not."""
    return state_path() / _NEWER


# ---- lines --------------------------------------------------------------------------------------


def to_line(entry: Entry) -> bytes:
    """Return an entry as one line."""
    told = {"model": entry.model, **asdict(entry.record)}
    return json.dumps(told, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> Entry:
    """Return the entry of a line; raises `ValueError` for what is none.

    What a later version wrote beside what is known here is left out.
    """
    try:
        told = _checked(dict, json.loads(line, parse_constant=_no_number))
    except RecursionError as error:
        raise ValueError("a line is nested too deeply") from error
    miss = told.get("miss")
    parts = {
        "usage": _made(Usage, told.get("usage")),
        "timings": _made(Timings, told.get("timings")),
        "miss": None if miss is None else _made(Miss, miss),
    }
    record = _made(Record, {**told, **parts})
    if not 0 <= record.at < _AT_MOST:
        raise ValueError(f"{record.at} is no time")
    return Entry(_checked(str, told.get("model")), record)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _made(kind: type[T], told: object) -> T:
    """Return a dataclass of the fields in `told`, each of the type it is to have."""
    given = _checked(dict, told)
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind) if each.name in given]  # type: ignore[arg-type]
    try:
        return kind(**{name: _checked(hints[name], given[name]) for name in names})
    except TypeError as error:
        raise ValueError(f"a line lacks a field: {error}") from error


def _checked(hint: Any, value: object) -> Any:
    """Return a value that is of a type; whole numbers are numbers, and truth is none."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        plain = NoneType if kind is None else kind
        if not isinstance(plain, type):  # one of several texts; later versions may know more
            plain = str
        wider = (int, float) if plain is float else plain
        if isinstance(value, wider) and (plain is bool or not isinstance(value, bool)):
            return value
    raise ValueError(f"{value!r} is no {hint}")


# ---- reading ------------------------------------------------------------------------------------


def read_journal(path: Path | None = None) -> Journal:
    """Return what the files hold. Raises `ConfigError` where one is there and cannot be read."""
    path = path or journal_path()
    entries, n_damaged = [], 0
    for file in (path.with_name(_OLDER), path):
        for line in _lines(file):
            try:
                entries.append(from_line(line))
            except ValueError:
                n_damaged += 1
    return Journal(path, tuple(entries), n_damaged)


def _lines(file: Path) -> list[bytes]:
    try:
        return [line for line in file.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be read: {error.strerror or error}') from error


# ---- writing ------------------------------------------------------------------------------------


class JournalWriter:
    """Appends entries from any thread, without waiting. Close it at the end.

    Where nothing can be written the reason is logged once, and requests go on.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, entry: Entry) -> None:
        """Have an entry written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
            self._thread.start()
        self._waiting.put(entry)

    def close(self) -> None:
        """Wait until all is written, or the disk does not answer."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_PATIENCE)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self) -> None:
        failed = False
        while (entry := self._waiting.get()) is not None:
            try:
                append(state_dir() / _NEWER, to_line(entry))
            except (OSError, ConfigError, ValueError) as error:
                if not failed:
                    log.warning("what requests take is not recorded: %s", error)
                failed = True


def append(path: Path, line: bytes, n_bytes_most: int = N_BYTES_MOST) -> None:
    """Append a line; what is too much then leaves with the older file. Raises `OSError`."""
    while True:
        with _locked(path) as file:
            if not _stands_at(path, file):
                continue  # another process has just put it away
            size = os.fstat(file).st_size
            if size and size + len(line) > n_bytes_most // 2:
                os.replace(path, path.with_name(_OLDER))
                continue
            os.write(file, b"\n" * _is_torn(file) + line)
            return


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _is_torn(file: int) -> bool:
    """Return whether the last line has no end: whoever wrote it died."""
    if not os.lseek(file, 0, os.SEEK_END):
        return False
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) != b"\n"


def _stands_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
