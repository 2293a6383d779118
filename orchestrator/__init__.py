"""Chat, serve and batch hybrid GGUF models on llama.cpp without reading a prompt twice."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine as Engine
    from orchestrator.engine.request import Finished as Finished
    from orchestrator.engine.request import Prefilling as Prefilling
    from orchestrator.engine.request import Sampling as Sampling
    from orchestrator.engine.request import Text as Text

__all__ = ["Engine", "Finished", "OrchestratorError", "Prefilling", "Sampling", "Text"]

try:
    __version__ = version("orchestrator")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: `--help` need not load llama.cpp."""
    if name == "Engine":
        from orchestrator.engine.engine import Engine

        return Engine
    if name in ("Finished", "Prefilling", "Sampling", "Text"):
        from orchestrator.engine import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
