"""Where does this package keep its files?

In two directories per user, outside any checkout. The cache directory holds what can be made
again: the demo model and the tiny test models; deleting it costs a rebuild. The state directory
holds what was typed and what requests took; it is for its user's eyes alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from orchestrator.errors import ConfigError

CACHE_VARIABLE = "ORCHESTRATOR_CACHE_DIR"
STATE_VARIABLE = "ORCHESTRATOR_STATE_DIR"


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


def state_path() -> Path:
    """Return the state directory, which may not be there yet.

    It is ``$ORCHESTRATOR_STATE_DIR`` if that is set and not empty, else the user's state
    directory for ``orchestrator``.
    """
    named = os.environ.get(STATE_VARIABLE)
    return expanded(named) if named else Path(platformdirs.user_state_dir("orchestrator"))


def state_dir() -> Path:
    """Return the state directory, created for its user alone if it was missing.

    Raises `ConfigError` if it cannot be.
    """
    folder = state_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'the state directory "{folder}" cannot be made: {error.strerror or error}; '
            f"set {STATE_VARIABLE} to a folder you may write to"
        ) from error
    return folder
