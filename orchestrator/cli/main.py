"""``orchestrator``: which command is meant, and what is its exit status?

    0    done
    1    an error, told in one line on standard error
    2    the command line itself is wrong
    130  interrupted

A traceback is shown only where ``ORCHESTRATOR_TRACE=1`` asks for it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from orchestrator import __version__
from orchestrator.cli.cache import cache
from orchestrator.cli.chat import chat
from orchestrator.cli.opening import OpenEngine, Seam, open_engine
from orchestrator.errors import OrchestratorError

TRACE_VARIABLE = "ORCHESTRATOR_TRACE"
FAILED = 1
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="orchestrator")
def cli() -> None:
    """Chat with hybrid GGUF models on llama.cpp without reading a prompt twice."""


cli.add_command(chat)
cli.add_command(cache)


def main(arguments: Sequence[str] | None = None, open_engine: OpenEngine = open_engine) -> int:
    """Run the command line `arguments` (None: those of the process) and return the exit status."""
    _never_fail_to_print()
    _log_in_lines()
    if sys.stdout is None or sys.stderr is None:
        return FAILED  # closed by who started us: there is nobody to tell
    _leave_in_order()
    try:
        status = cli.main(
            args=arguments, prog_name="orchestrator", standalone_mode=False, obj=Seam(open_engine)
        )
        sys.stdout.flush()
    except Exception as error:
        return _failure(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _leave_in_order() -> None:
    """Let a polite kill unwind, so that the terminal is left as it was found."""
    for wish in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not the main thread: somebody embeds us
            signal.signal(wish, _leave)


def _leave(wish: int, _frame: object) -> None:
    raise SystemExit(128 + wish)


def _failure(error: Exception) -> int:
    """Say what went wrong and return the exit status for it."""
    if _traces():
        traceback.print_exception(error)
    if isinstance(error, click.Abort):  # click's word for Ctrl-C
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, OSError):
        _drop_output()
    if not isinstance(error, BrokenPipeError):
        click.echo(f"error: {_message(error)}", err=True)
    return FAILED


def _message(error: Exception) -> str:
    if isinstance(error, OrchestratorError):
        return str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return (
        f"{type(error).__name__}: {error}\n"
        f"This is a defect of orchestrator; {TRACE_VARIABLE}=1 shows where it happened."
    )


def _traces() -> bool:
    return os.environ.get(TRACE_VARIABLE) == "1"


class _WithoutTrace(logging.Formatter):
    """Tells what happened and leaves out where."""

    def formatException(self, ei: object) -> str:
        """Return nothing, which `format` takes for no trace."""
        return ""


def _log_in_lines() -> None:
    """Show what the package logs on standard error, from warnings upwards."""
    kind = logging.Formatter if _traces() else _WithoutTrace
    handler = logging.StreamHandler()
    handler.setFormatter(kind("%(levelname)s: %(message)s"))
    logging.getLogger("orchestrator").handlers = [handler]


def _never_fail_to_print() -> None:
    """Let characters that the terminal's encoding lacks come out as ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Standard output is gone or full: keep Python from saying so again when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
