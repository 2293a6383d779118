"""Which model is meant by a name, and how is it to be opened?

Reads `models.toml` into frozen values. Knows no model file and no engine: a path is taken as it
stands, and whoever opens it says what is wrong with it.

Invariant: `demo` is always known, whatever the file holds, so that a broken path elsewhere never
takes the built-in model away.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from orchestrator.errors import ConfigError
from orchestrator.paths import expanded

FILE_NAME = "models.toml"
VERSION = 1
BUILTINS = ("demo",)

Table = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model and how to open it. Exactly one of `path` and `builtin` is set.

    None leaves a choice to whoever opens the model; `ctx` is in tokens, `lanes` are requests at
    once, `exact` asks for bitwise the same replies warm and cold. `sampling` holds the
    fields of a `Sampling` that the file sets, not yet checked for their range.
    """

    name: str
    path: Path | None = None
    builtin: str | None = None
    ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    lanes: int | None = None
    exact: bool | None = None
    template: Path | None = None
    sampling: Mapping[str, int | float] = field(default_factory=dict)


DEMO = ModelSpec(
    "demo",
    builtin="demo",
    # A small model wanders off at the usual temperature and repeats itself at none.
    sampling={"temperature": 0.2, "repeat_penalty": 1.1},
)


@dataclass(frozen=True, slots=True)
class Config:
    """The models known by name. `file` is where they were read, None for the built-in set."""

    default: str = DEMO.name
    models: Mapping[str, ModelSpec] = field(default_factory=lambda: {DEMO.name: DEMO})
    file: Path | None = None


def find(named: Path | None = None) -> Path | None:
    """Return the file to read: `named`, or the current directory's, or the user's, or None."""
    if named is not None:
        return named
    places = (Path.cwd(), Path(platformdirs.user_config_dir("orchestrator")))
    return next((place / FILE_NAME for place in places if (place / FILE_NAME).is_file()), None)


def load(file: Path | None) -> Config:
    """Return what `file` says, or the built-in set for None. Raises `ConfigError`."""
    if file is None:
        return Config()
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be read: {error.strerror or error}') from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'"{file}" is not valid TOML: {error}') from error
    return _config(document, file)


def resolve(wanted: str | Path | None, config: Config) -> ModelSpec:
    """Return the model meant by a name in `config`, a path, or None for the default.

    A name wins over a path that is spelled alike. Raises `ConfigError` for what is neither.
    """
    if wanted is None:
        wanted = config.default
    if isinstance(wanted, str) and wanted in config.models:
        return config.models[wanted]
    path = expanded(wanted)
    if isinstance(wanted, Path) or _looks_like_path(wanted):
        return ModelSpec(name=path.stem or str(path), path=path)
    raise ConfigError(
        f'no model is named "{wanted}" and no such file exists{_nearest(wanted, config.models)}; '
        f"known: {', '.join(config.models)}"
    )


def _looks_like_path(text: str) -> bool:
    separators = [os.sep, *filter(None, [os.altsep])]
    spelled = text.endswith(".gguf") or any(separator in text for separator in separators)
    return spelled or _exists(expanded(text))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long to be one, or a folder that may not be searched
        return False


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return a question about the nearest known word, to be put after `word`; often empty."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f' (did you mean "{near[0]}"?)' if near else ""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups in one table, with errors that say where in the file it stands."""

    file: Path
    where: str
    table: Table

    def check_keys(self, known: Iterable[str]) -> None:
        known = tuple(known)
        for key in self.table:
            if key not in known:
                raise self.error(
                    f'unknown key "{key}"{_nearest(key, known)}; known: {", ".join(known)}'
                )

    def error(self, message: str) -> ConfigError:
        where = f"[{self.where}] " if self.where else ""
        return ConfigError(f'"{self.file}": {where}{message}')

    def wrong(self, key: str, expected: str) -> ConfigError:
        return self.error(f"{key} is {self.table[key]!r}, expected {expected}")

    def text(self, key: str) -> str | None:
        value = self.table.get(key)
        if value is not None and not (isinstance(value, str) and value):
            raise self.wrong(key, "a text that is not empty")
        return value

    def path(self, key: str) -> Path | None:
        text = self.text(key)
        return None if text is None else self.file.parent / expanded(text)

    def integer(self, key: str, low: int) -> int | None:
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.wrong(key, f"a whole number of at least {low}")
        return value

    def truth(self, key: str) -> bool | None:
        value = self.table.get(key)
        if not (value is None or isinstance(value, bool)):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str) -> int | float:
        value = self.table[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return value

    def inner(self, key: str) -> _Reader:
        value = self.table.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "a table")
        return _Reader(self.file, f"{self.where}.{key}" if self.where else key, value)


def _config(document: Table, file: Path) -> Config:
    top = _Reader(file, "", document)
    top.check_keys(("version", "default", "models"))
    if "version" not in document:
        raise top.error(f'version is missing; put "version = {VERSION}" at the top')
    if top.integer("version", low=1) != VERSION:
        raise top.error(f"version is {document.get('version')!r}, expected {VERSION}")
    tables = top.inner("models")
    named = {name: _model(name, tables.inner(name)) for name in tables.table}
    models = {DEMO.name: DEMO, **named}
    default = top.text("default") or DEMO.name
    if default not in models:
        raise top.error(
            f'default is "{default}", which is no model{_nearest(default, models)}; '
            f"known: {', '.join(models)}"
        )
    return Config(default, models, file)


_MODEL_KEYS = (
    "path",
    "builtin",
    "ctx",
    "threads",
    "gpu_layers",
    "lanes",
    "exact",
    "template",
    "sampling",
)


def _model(name: str, reader: _Reader) -> ModelSpec:
    reader.check_keys(_MODEL_KEYS)
    path, builtin = reader.path("path"), reader.text("builtin")
    if (path is None) == (builtin is None):
        raise reader.error('needs either path = "FILE.gguf" or builtin = "demo", and not both')
    if builtin is not None and builtin not in BUILTINS:
        raise reader.wrong("builtin", " or ".join(f'"{known}"' for known in BUILTINS))
    return ModelSpec(
        name=name,
        path=path,
        builtin=builtin,
        ctx=reader.integer("ctx", low=1),
        threads=reader.integer("threads", low=1),
        gpu_layers=reader.integer("gpu_layers", low=-1),
        lanes=reader.integer("lanes", low=1),
        exact=reader.truth("exact"),
        template=reader.path("template"),
        sampling={**(DEMO.sampling if builtin else {}), **_sampling(reader.inner("sampling"))},
    )


_SAMPLING_NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
_SAMPLING_INTEGERS = ("top_k", "repeat_last", "seed")


def _sampling(reader: _Reader) -> dict[str, int | float]:
    reader.check_keys(_SAMPLING_NUMBERS + _SAMPLING_INTEGERS)
    numbers = {key: reader.number(key) for key in _SAMPLING_NUMBERS if key in reader.table}
    integers = {key: reader.integer(key, low=0) for key in _SAMPLING_INTEGERS}
    return numbers | {key: value for key, value in integers.items() if value is not None}
