"""Where does this package keep files that it can make again?

One cache directory per user, outside any checkout: the demo model and the tiny test models.
Nothing in it is precious; deleting it costs a rebuild.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from orchestrator.errors import ConfigError

CACHE_VARIABLE = "ORCHESTRATOR_CACHE_DIR"


def expanded(path: str | Path) -> Path:
    """Return `path` with ``~`` and ``~user`` replaced; raises `ConfigError` for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f'"{path}" names the home of a user who does not exist here') from error


def cache_dir() -> Path:
    """Return the cache directory, created if it was missing.

    It is ``$ORCHESTRATOR_CACHE_DIR`` if that is set and not empty, else the user's cache
    directory for ``orchestrator``. Raises `ConfigError` if it cannot be created or written.
    """
    named = os.environ.get(CACHE_VARIABLE)
    folder = expanded(named) if named else Path(platformdirs.user_cache_dir("orchestrator"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Only a write proves that a folder can be written: access(2) is wrong for root and on
        # network file systems.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f'the cache directory "{folder}" cannot be written: {error.strerror or error}; '
            f"set {CACHE_VARIABLE} to a folder you may write to"
        ) from error
    return folder
