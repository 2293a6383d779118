"""Chat, serve and batch hybrid GGUF models on llama.cpp without reading a prompt twice."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from orchestrator.errors import (
    Busy,
    EngineClosed,
    InvalidArgument,
    OrchestratorError,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
)

if TYPE_CHECKING:
    from orchestrator.engine.aio import AsyncEngine as AsyncEngine
    from orchestrator.engine.aio import AsyncSession as AsyncSession
    from orchestrator.engine.aio import AsyncStream as AsyncStream
    from orchestrator.engine.engine import Engine as Engine
    from orchestrator.engine.request import Finished as Finished
    from orchestrator.engine.request import Outcome as Outcome
    from orchestrator.engine.request import Prefilling as Prefilling
    from orchestrator.engine.request import Request as Request
    from orchestrator.engine.request import Sampling as Sampling
    from orchestrator.engine.request import Text as Text
    from orchestrator.engine.script import SessionEvent as SessionEvent
    from orchestrator.engine.session import Session as Session
    from orchestrator.engine.session import SessionView as SessionView
    from orchestrator.engine.stream import Stream as Stream

__all__ = [
    "AsyncEngine",
    "AsyncSession",
    "AsyncStream",
    "Busy",
    "Engine",
    "EngineClosed",
    "Finished",
    "InvalidArgument",
    "OrchestratorError",
    "Outcome",
    "Prefilling",
    "PromptTooLong",
    "Request",
    "Sampling",
    "Session",
    "SessionBusy",
    "SessionClosed",
    "SessionEvent",
    "SessionView",
    "Stream",
    "Text",
]

_HOMES = {
    "aio": ("AsyncEngine", "AsyncSession", "AsyncStream"),
    "engine": ("Engine",),
    "request": ("Finished", "Outcome", "Prefilling", "Request", "Sampling", "Text"),
    "script": ("SessionEvent",),
    "session": ("Session", "SessionView"),
    "stream": ("Stream",),
}

try:
    __version__ = version("orchestrator")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: `--help` need not load llama.cpp."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"orchestrator.engine.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
