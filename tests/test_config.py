"""models.toml: what is read from it, and what is said about its mistakes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from orchestrator.config import DEMO, Config, ModelSpec, find, load, resolve
from orchestrator.engine.request import Sampling
from orchestrator.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def written(folder: Path, models: str, head: str = "version = 1\n") -> Path:
    file = folder / "models.toml"
    file.write_text(head + models, encoding="utf-8")
    return file


def test_the_file_of_this_project_names_the_demo_as_its_default() -> None:
    config = load(ROOT / "models.toml")
    assert resolve(None, config) == DEMO


def test_without_a_file_the_demo_is_known() -> None:
    assert resolve("demo", load(None)).builtin == "demo"


def test_every_key_of_a_model_is_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [models.big]
        path = "weights/big.gguf"
        ctx = 4096
        threads = 2
        gpu_layers = -1
        template = "big.jinja"
        sampling = { temperature = 0, top_p = 0.9, seed = 7 }
        """,
    )
    assert resolve("big", load(file)) == ModelSpec(
        name="big",
        path=tmp_path / "weights/big.gguf",
        ctx=4096,
        threads=2,
        gpu_layers=-1,
        template=tmp_path / "big.jinja",
        sampling={"temperature": 0, "top_p": 0.9, "seed": 7},
    )


def test_the_demo_stays_known_beside_the_models_of_a_file(tmp_path: Path) -> None:
    config = load(written(tmp_path, '[models.a]\npath = "a.gguf"\n'))
    assert resolve("demo", config) == DEMO


def test_a_file_may_open_the_demo_in_its_own_way(tmp_path: Path) -> None:
    config = load(written(tmp_path, '[models.demo]\nbuiltin = "demo"\nctx = 512\n'))
    assert resolve(None, config).ctx == 512


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ('[models.a]\npath = "a"\nthread = 2', 'unknown key "thread" (did you mean "threads"?)'),
        ('[models.a]\npath = "a"\nctx = "big"', "ctx is 'big', expected a whole number"),
        ('[models.a]\npath = "a"\nctx = true', "ctx is True, expected a whole number"),
        ('[models.a]\npath = "a"\nctx = 0', "at least 1"),
        ("[models.a]\npath = 3", "path is 3, expected a text"),
        ('[models.a]\npath = ""', "path is '', expected a text"),
        ("[models.a]\nctx = 5", "needs either path"),
        ('[models.a]\npath = "a"\nbuiltin = "demo"', "and not both"),
        ('[models.a]\nbuiltin = "dem"', "builtin is 'dem', expected \"demo\""),
        ('[models.a]\npath = "a"\nsampling = { temperatur = 1 }', 'did you mean "temperature"?'),
        ('[models.a]\npath = "a"\nsampling = { top_p = "x" }', "[models.a.sampling] top_p is 'x'"),
        ('[models.a]\npath = "a"\nsampling = 1', "sampling is 1, expected a table"),
        ("models = 1", "models is 1, expected a table"),
        ('default = "dmo"', 'default is "dmo", which is no model (did you mean "demo"?)'),
        ("defualt = 1", 'did you mean "default"?'),
        ("[models", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_was_expected(
    tmp_path: Path, models: str, said: str
) -> None:
    file = written(tmp_path, models)
    with pytest.raises(ConfigError) as raised:
        load(file)
    assert said in str(raised.value)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("head", ["", "version = 2\n", 'version = "1"\n'])
def test_a_file_of_another_version_is_refused(tmp_path: Path, head: str) -> None:
    with pytest.raises(ConfigError, match="version is"):
        load(written(tmp_path, "", head=head))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "models.toml")
    (tmp_path / "models.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "models.toml")


def test_a_path_is_a_model_whether_or_not_it_exists(tmp_path: Path) -> None:
    # Whoever opens it says what is wrong with it, and knows more about it.
    assert resolve("nowhere/granite.gguf", Config()).path == Path("nowhere/granite.gguf")
    assert resolve(tmp_path, Config()).path == tmp_path


def test_a_word_that_is_neither_name_nor_file_lists_the_names() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve("dema", Config())
    assert 'no model is named "dema"' in str(raised.value)
    assert '(did you mean "demo"?); known: demo' in str(raised.value)


def test_the_nearest_file_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    (home / "orchestrator").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    assert find() is None
    user = written(home / "orchestrator", "")
    assert find() == user
    current = written(here, "")
    assert find() == current
    assert find(Path("other.toml")) == Path("other.toml")


def test_the_sampling_keys_are_those_of_the_engine(tmp_path: Path) -> None:
    of_a_request = {"logit_bias", "grammar", "json_schema", "logprobs"}
    keys = {each.name for each in fields(Sampling)} - of_a_request
    table = ", ".join(f"{key} = 1" for key in sorted(keys))
    file = written(tmp_path, f'[models.a]\npath = "a"\nsampling = {{ {table} }}\n')
    assert set(resolve("a", load(file)).sampling) == keys


def test_the_demo_of_a_file_keeps_its_own_sampling_where_the_file_is_silent(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        'version = 1\n[models.demo]\nbuiltin = "demo"\nsampling = { temperature = 0.9 }\n'
    )
    sampling = resolve("demo", load(file)).sampling
    assert sampling == {**DEMO.sampling, "temperature": 0.9}


def test_a_missing_version_is_said_to_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('default = "demo"\n')
    with pytest.raises(ConfigError, match="version is missing"):
        load(file)
