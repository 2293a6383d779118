"""How is the screen kept clean of keys that are struck while nobody is asked for any?"""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_keys() -> Iterator[None]:
    """Let the terminal echo nothing; what is typed ahead stands at the next prompt.

    Ctrl-C still interrupts. Does nothing where standard input is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
