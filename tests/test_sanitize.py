"""The C extension under address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_extension_is_clean_under_sanitizers_on_its_own_tests() -> None:
    run = subprocess.run(
        [ROOT / "scripts" / "sanitize"], capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " passed" in run.stdout
