"""Imports go one way, and heavy or foreign packages stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestrator

PACKAGE = Path(__file__).resolve().parents[1] / "orchestrator"

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "paths": {"errors"},
    "config": {"errors", "paths"},
    "models": {"errors", "paths", "config"},
    "text": {"models", "errors", "paths", "config"},
    "pool": {"models", "errors", "paths", "config"},
    # A runtime has a vocabulary, and so needs to know what a tokenizer is.
    "runtime": {"_seqstate", "text", "models", "errors", "paths", "config"},
    "engine": {"runtime", "pool", "text", "models", "errors", "paths", "config"},
    "store": {"engine", "errors", "paths"},
    "cli": {"store", "engine", "text", "errors", "paths", "config", ""},
}
"""What each part may import, beside itself. The empty name is the package: its public names."""

OWNERS = {
    "llama_cpp": "runtime/library.py",
    "click": "cli/",
    "rich": "cli/",
    "prompt_toolkit": "cli/",
}
"""The only place that imports each of these."""

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
PARTS = [module for module in MODULES if module != Path("__init__.py")]


def imported(module: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            name = node.module or ""
            whole = name == "orchestrator"
            yield from (f"{name}.{each.name}" for each in node.names) if whole else (name,)


def part(name: str) -> str:
    """Return the part of the package a dotted name lies in, empty for a public name."""
    word = name.split(".")[1] if "." in name else ""
    return word if word in LAYERS or word == "_seqstate" else ""


@pytest.mark.parametrize("module", PARTS, ids=str)
def test_a_module_imports_only_what_lies_below_it(module: Path) -> None:
    own = module.parts[0].removesuffix(".py")
    allowed = LAYERS[own] | {own}
    names = {name for name in imported(module) if name.split(".")[0] == "orchestrator"}
    assert {name for name in names if part(name) not in allowed} == set()


@pytest.mark.parametrize("package", OWNERS)
def test_a_foreign_package_is_imported_in_its_place_alone(package: str) -> None:
    importers = {
        module.as_posix()
        for module in MODULES
        if any(name.split(".")[0] == package for name in imported(module))
    }
    assert {each for each in importers if not each.startswith(OWNERS[package])} == set()


def test_the_public_names_are_these_and_all_there() -> None:
    assert set(orchestrator.__all__) == {
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
    }
    assert {getattr(orchestrator, name).__name__ for name in orchestrator.__all__} == set(
        orchestrator.__all__
    )


def test_a_name_that_is_not_public_is_missing_as_any_other() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pool'"):
        orchestrator.Pool  # noqa: B018
