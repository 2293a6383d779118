"""From a name to a runtime that is ready: which file, which template, which sizes?

Explicit choices win over `models.toml`, which wins over what is computed here. Nothing is loaded
before the file was inspected, so that what is wrong with it is said at once and in words.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import config
from orchestrator.config import ModelSpec
from orchestrator.engine.core import Options
from orchestrator.engine.exactness import Kernels, exacted, steadied
from orchestrator.engine.request import check_flag
from orchestrator.engine.scheduler import Patience
from orchestrator.errors import ConfigError, InvalidArgument
from orchestrator.models.demo import ensure_demo
from orchestrator.models.inspect import ModelFile, inspect
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.exact import SINGLE
from orchestrator.runtime.llama import LlamaRuntime, Settings, n_cores, open_llama
from orchestrator.runtime.protocol import Limits, Runtime, Sampling
from orchestrator.text.template import ChatTemplate

Progress = Callable[[str], None]

N_CONTEXT_DEFAULT = 8192
"""Tokens per request where neither the caller nor the configuration says, or the model's less."""

N_CONTEXT_MOST = 1 << 24
N_SEQUENCES_MOST = 32
N_LANES_MOST = 64
N_GPU_LAYERS_MOST = 1 << 16
_SPARES_LEAST = 3  # a turn keeps its turn, resend and reply points
_STATE_SHARE = 8  # an eighth of the memory that is available may go to recurrent states
_HISTORY_MOST = 256  # more than that is hardly ever gone back to
_EXPORT_SHARE = 8  # and as much to checkpoints in host memory


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller asks for; None leaves it to the configuration or to what fits."""

    ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    chat_template: Path | None = None
    checkpoints: int | None = None
    history: int | None = None
    lanes: int | None = None
    exact: bool = False
    resident_cells: int | None = None
    exported_bytes: int | None = None
    exported_tokens: int | None = None
    queue: int | None = None

    def __post_init__(self) -> None:
        check_flag("exact", self.exact)
        if not (self.chat_template is None or isinstance(self.chat_template, Path)):
            raise InvalidArgument(f"chat_template is {self.chat_template!r}; give a Path")
        _at_least("lanes", self.lanes, 1)
        if self.lanes is not None and self.lanes > N_LANES_MOST:
            raise InvalidArgument(f"lanes is {self.lanes}, must be at most {N_LANES_MOST}")
        _at_least("resident_cells", self.resident_cells, 0)
        _at_least("exported_bytes", self.exported_bytes, 0)
        _at_least("exported_tokens", self.exported_tokens, 0)
        _at_least("queue", self.queue, 1)
        _at_least("ctx", self.ctx, 1)
        if self.ctx is not None and self.ctx > N_CONTEXT_MOST:
            raise InvalidArgument(f"ctx is {self.ctx:,}, must be at most {N_CONTEXT_MOST:,}")
        _at_least("threads", self.threads, 1)
        if self.threads is not None and self.threads > n_cores():
            raise InvalidArgument(
                f"threads is {self.threads}, this process may use {n_cores()} cores; "
                "more threads than cores are many times slower, not faster"
            )
        _at_least("gpu_layers", self.gpu_layers, -1)
        if self.gpu_layers is not None and self.gpu_layers > N_GPU_LAYERS_MOST:
            raise InvalidArgument(
                f"gpu_layers is {self.gpu_layers}, must be at most {N_GPU_LAYERS_MOST}; "
                "leave it out to put all there"
            )
        _at_least("checkpoints", self.checkpoints, 0)
        _at_least("history", self.history, 0)


@dataclass(frozen=True, slots=True)
class Opened:
    """A runtime and all that goes with it.

    `exact`: it was asked for, and holds. `notes` are for a person.
    """

    runtime: Runtime
    template: ChatTemplate
    options: Options
    sampling: Sampling
    name: str = ""
    exact: bool = False
    notes: tuple[str, ...] = ()


def open_model(model: str | Path | ModelSpec, choices: Choices, on_progress: Progress) -> Opened:
    """Find, inspect and load a model; to be called on the thread that will own it."""
    if not isinstance(model, ModelSpec | str | Path):
        raise InvalidArgument(f"the model is {model!r}; give a name, a path or a ModelSpec")
    spec = model if isinstance(model, ModelSpec) else _spec(model)
    path = ensure_demo(on_progress) if spec.builtin else spec.path
    if path is None:
        raise ConfigError(f'model "{spec.name}" has no file; set path= in models.toml')
    choices = _merged(choices, spec)
    file = inspect(path)
    sampling = Sampling(**spec.sampling)  # type: ignore[arg-type]  # names and types were checked
    on_progress(f"loading {path.name} ({file.size_bytes / 1e6:,.0f} MB)")
    kernels = _kernels(file, choices)
    runtime = open_llama(path, kernels.settings)
    try:
        template = _template(runtime, choices.chat_template)
        options = _options(runtime.limits, choices)
    except BaseException:
        runtime.close()
        raise
    notes = _notes(runtime, template)
    return Opened(runtime, template, options, sampling, spec.name, choices.exact, notes)


def _kernels(file: ModelFile, choices: Choices) -> Kernels:
    """Return how a model is computed; exactly, each lane has cells of its own and nothing else."""
    settings = _settings(file, choices)
    if not choices.exact:
        return steadied(file, settings)
    return Kernels(exacted(file, replace(settings, n_sequences=choices.lanes or 1)), exact=True)


def _merged(choices: Choices, spec: ModelSpec) -> Choices:
    """Return what is asked for, the caller's word before the file's."""
    return replace(
        choices,
        ctx=spec.ctx if choices.ctx is None else choices.ctx,
        threads=spec.threads if choices.threads is None else choices.threads,
        gpu_layers=spec.gpu_layers if choices.gpu_layers is None else choices.gpu_layers,
        lanes=spec.lanes if choices.lanes is None else choices.lanes,
        exact=choices.exact or bool(spec.exact),
        chat_template=spec.template if choices.chat_template is None else choices.chat_template,
    )


def _spec(model: str | Path) -> ModelSpec:
    return config.resolve(model, config.load(config.find()))


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give a whole number")
    if value < low:
        raise InvalidArgument(f"{name} is {value}, must be at least {low}; or leave it out")


def _settings(file: ModelFile, choices: Choices) -> Settings:
    wanted = choices.ctx
    if wanted is None:
        wanted = min(N_CONTEXT_DEFAULT, file.n_ctx_train or N_CONTEXT_DEFAULT)
    lanes = choices.lanes or 1
    return Settings(
        n_context=wanted,
        n_cells=min(wanted * lanes, N_CONTEXT_MOST),
        n_sequences=_n_sequences(choices),
        n_sequences_least=lanes + _SPARES_LEAST,
        n_sequences_most=max(N_SEQUENCES_MOST, 2 * lanes),
        state_budget=available_memory() // _STATE_SHARE,
        threads=choices.threads,
        gpu_layers=choices.gpu_layers,
    )


def _n_sequences(choices: Choices) -> int | None:
    """One for each lane and each resident checkpoint; None is as many as memory allows."""
    lanes = choices.lanes or 1
    if choices.checkpoints is None:
        return None
    if choices.checkpoints + lanes > 255:
        raise InvalidArgument(
            f"checkpoints is {choices.checkpoints} and lanes {lanes}, "
            "llama.cpp holds 255 sequences in all; lower one of them"
        )
    return choices.checkpoints + lanes


def _options(limits: Limits, choices: Choices) -> Options:
    lanes = choices.lanes or 1
    spare = max(0, limits.n_sequences - lanes - _SPARES_LEAST)
    exported = choices.exported_bytes
    if exported is None:
        exported = available_memory() // _EXPORT_SHARE
    budgets = Budgets(
        resident_cells=choices.resident_cells,
        exported_bytes=exported,
        exported_tokens=choices.exported_tokens,
        history=_history(limits, spare, exported) if choices.history is None else choices.history,
    )
    patience = Patience() if choices.queue is None else Patience(n_waiting=choices.queue)
    return Options(lanes, choices.checkpoints != 0, budgets, patience)


def _history(limits: Limits, spare: int, exported_bytes: int) -> int:
    """Return how many states may serve who goes back: half of what there is room for.

    In host memory where a state can be kept there without its rows, else in sequences.
    """
    if limits.snapshots and limits.state_bytes:
        return min(exported_bytes // (2 * limits.state_bytes), _HISTORY_MOST)
    return spare // 2


def _template(runtime: Runtime, file: Path | None) -> ChatTemplate:
    tokenizer = runtime.tokenizer
    bos = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)
    eos = "" if tokenizer.eos is None else tokenizer.token_text(tokenizer.eos)
    if file is not None:
        return _reading(ChatTemplate.from_file(file, bos_text=bos, eos_text=eos))
    source = runtime.model.chat_template
    if source is None:
        return ChatTemplate.fallback(bos_text=bos, eos_text=eos)
    return ChatTemplate(source, bos_text=bos, eos_text=eos, name="the model's chat template")


def _reading(template: ChatTemplate) -> ChatTemplate:
    """Refuse a file that is no chat template, though it may be valid Jinja."""
    if "messages" not in template.variables:
        raise ConfigError(f'"{template.name}" is no chat template: it never reads the messages')
    return template


def _notes(runtime: LlamaRuntime, template: ChatTemplate) -> tuple[str, ...]:
    """Return what a user should know of how the model was opened."""
    notes = []
    if runtime.passes == SINGLE:
        notes.append(
            "exact: with these weights only single tokens give the same bits always, so prompts "
            "are read as slowly as replies are written; a quantised file does not have that"
        )
    n_context, trained = runtime.limits.n_context, runtime.model.n_context_train
    if template.is_fallback:
        notes.append(
            "the model brings no chat template: ChatML is used; --chat-template FILE names one"
        )
    if 0 < trained < n_context:
        notes.append(
            f"the context of {n_context:,} tokens is longer than the {trained:,} the model was "
            "trained on: expect worse replies beyond that"
        )
    return tuple(notes)


def available_memory() -> int:
    """Return the bytes of memory that can be taken now without swapping, as far as known."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of what is installed is a careful guess
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
