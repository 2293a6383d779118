"""The scripts a person runs: that they are sound, not what they take minutes to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASH = ["scripts/setup", "scripts/chat", "scripts/test", "scripts/check", ".ci/run"]
ALL = [
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / ".ci").iterdir()]
    if path.is_file() and path.read_bytes().startswith(b"#!")
]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    environment = options.pop("env", None) or dict(os.environ)
    assert isinstance(environment, dict)
    cwd = str(options.pop("cwd", ROOT))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment
    )


@pytest.mark.parametrize("script", BASH)
def test_a_script_can_be_parsed_and_stops_at_the_first_failure(script: str) -> None:
    assert run(["bash", "-n", script]).stderr == ""
    assert "set -euo pipefail" in (ROOT / script).read_text()


@pytest.mark.parametrize("script", sorted(ALL))
def test_a_script_is_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def checkout(folder: Path) -> Path:
    """Return a checkout as far as `scripts/setup` looks at it, without an environment."""
    (folder / "scripts").mkdir()
    (folder / "native").mkdir()
    (folder / "orchestrator").mkdir()
    shutil.copy(ROOT / "scripts/setup", folder / "scripts/setup")
    for name in ("pyproject.toml", "setup.py", "native/seqstate.c"):
        (folder / name).touch()
    return folder


def tools(folder: Path, *names: str) -> dict[str, str]:
    """Return an environment whose PATH holds only the named programs."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return {"PATH": str(folder)}


PLAIN_TOOLS = ("bash", "dirname", "mkdir", "cat", "cksum", "rm")


def test_setup_says_that_python_is_missing(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    done = run(["bash", "scripts/setup"], cwd=root, env=tools(tmp_path / "bin", *PLAIN_TOOLS))
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr


def test_setup_says_that_a_compiler_is_missing(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    environment = tools(tmp_path / "bin", *PLAIN_TOOLS)
    fake_python(root / ".venv/bin/python")
    done = run(["bash", "scripts/setup"], cwd=root, env=environment)
    assert done.returncode == 1
    assert "no C compiler (cc) found" in done.stderr


def test_setup_does_nothing_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    environment = tools(tmp_path / "bin", *PLAIN_TOOLS)
    fake_python(root / ".venv/bin/python")
    (root / "orchestrator/_seqstate.abi3.so").touch()
    stamp = "{ pwd; cat pyproject.toml setup.py native/*.[ch]; } | cksum > .venv/setup.stamp"
    assert run(["bash", "-c", stamp], cwd=root).returncode == 0
    done = run(["bash", "scripts/setup"], cwd=root, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (root / "setup.py").write_text("# changed")
    assert run(["bash", "scripts/setup"], cwd=root, env=environment).returncode == 1


def fake_python(file: Path, pip: str = "true") -> None:
    """Put an interpreter there that calls itself recent enough; `pip` is what it installs with."""
    file.parent.mkdir(parents=True)
    file.write_text(
        f"#!{shutil.which('bash')}\n"
        f"case \"$*\" in *sysconfig*) echo native ;; *'pip install'*) {pip} ;; esac\n"
    )
    file.chmod(0o755)


def test_setup_installs_once_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "native/Python.h").touch()
    fake_python(root / ".venv/bin/python", pip="touch orchestrator/_seqstate.so")
    done = run(["bash", "scripts/setup"], cwd=root)
    assert done.returncode == 0
    assert "about ten minutes on" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("setup: ready after")
    again = run(["bash", "scripts/setup"], cwd=root)
    assert (again.returncode, again.stderr) == (0, "")


def test_setup_shows_the_log_of_an_installation_that_failed(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "native/Python.h").touch()
    fake_python(root / ".venv/bin/python", pip="echo no wheel for you; exit 3")
    done = run(["bash", "scripts/setup"], cwd=root)
    assert done.returncode == 1
    assert "no wheel for you\nsetup: the installation failed" in done.stderr
    assert not (root / ".venv/setup.stamp").exists()
