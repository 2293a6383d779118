"""The one thread that owns llama.cpp.

Other threads put work into its inbox; it alone opens the runtime, steps the core and closes both.
While nothing runs it sleeps in the inbox and costs nothing.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from orchestrator.engine.core import Core
from orchestrator.errors import BackendError, EngineClosed, InvalidArgument

log = logging.getLogger("orchestrator.engine")

T = TypeVar("T")
Work = Callable[[Core], None]


class Worker:
    """Runs a core on a thread of its own. `open_core` is called there, `close` as well."""

    def __init__(self, open_core: Callable[[], Core], close: Callable[[], None]) -> None:
        self._open_core = open_core
        self._close = close
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._opened: Future[Core] = Future()
        self._closing = threading.Lock()
        self._is_closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="orchestrator-engine", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether no more work is taken."""
        return self._is_closed

    def start(self) -> Core:
        """Start the thread; return its core once it is open, or raise what stopped it."""
        try:
            self._thread.start()
            return self._opened.result()
        except BaseException:  # Ctrl-C while a model loads: let the thread close it again
            self._ask_to_close()
            raise

    def post(self, work: Work) -> None:
        """Have `work` done between two steps; raises `EngineClosed` after `close`."""
        if os.getpid() != self._process:
            raise EngineClosed("the engine belongs to the process that opened it; open one here")
        with self._closing:
            if self._is_closed:
                raise EngineClosed("the engine is closed; open a new one")
            self._inbox.put(work)

    def call(self, work: Callable[[Core], T]) -> T:
        """Have `work` done between two steps and return what it returns."""
        if threading.current_thread() is self._thread:
            raise InvalidArgument(
                "this was called on the engine's own thread (by what watches the end of a stream, "
                "say), which would wait for itself; call it from another thread"
            )
        result: Future[T] = Future()

        def answer(core: Core) -> None:
            try:
                result.set_result(work(core))
            except Exception as error:  # handed to the caller, who raises it
                result.set_exception(error)

        self.post(answer)
        return result.result()

    def close(self) -> None:
        """End what runs with `EngineClosed`, free everything and wait; twice is harmless."""
        self._ask_to_close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _ask_to_close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)

    def _run(self) -> None:
        try:
            core = self._open_core()
        except BaseException as error:  # raised again in the thread that called `start`
            self._is_closed = True
            self._opened.set_exception(error)
            return
        self._opened.set_result(core)
        try:
            while self._take_in(core):
                self._step(core)
        except Exception:  # not even starting over was possible
            log.exception("the engine cannot go on and closes")
        finally:
            self._wind_up(core)

    def _wind_up(self, core: Core) -> None:
        """Answer everybody, also what came in last, and free the runtime."""
        self._ask_to_close()
        closed = EngineClosed("the engine was closed before the request ended")
        try:
            core.end_all(closed)
            while self._inbox.qsize():
                work = self._inbox.get()
                if work is not None:
                    work(core)
            core.end_all(closed)
        finally:
            self._close()

    def _take_in(self, core: Core) -> bool:
        """Do what the inbox holds, waiting for it while idle; False once asked to close."""
        waits = core.is_idle
        while True:
            try:
                work = self._inbox.get(block=waits)
            except queue.Empty:
                return True
            if work is None:
                return False
            work(core)
            waits = False

    def _step(self, core: Core) -> None:
        """Step once; a defect of ours ends what runs, with its trace in the log, and we go on."""
        try:
            core.step()
        except Exception as defect:
            log.exception("a step failed in a way nobody foresaw")
            core.fail_all(
                BackendError(f"internal error: {defect!r}; please report it with the log")
            )
