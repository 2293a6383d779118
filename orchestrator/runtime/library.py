"""Is the llama.cpp that llama-cpp-python loaded the one this package was written for?

The only importer of `llama_cpp`. Everything else reaches llama.cpp through `api` and
`function_addresses`, so that exactly one copy of the library is in the process. Structs are laid
out anew in nearly every release; a layout that no longer fits would be read as garbage, so the
defaults are probed once before the first use.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import llama_cpp

from orchestrator.errors import BackendError

api: Any = llama_cpp

_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max_per_seq": 1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "no_perf": True,
    "swa_full": True,
    "kv_unified": False,
}
_N_SEQUENCES_MOST = 256

_recent: deque[str] = deque(maxlen=40)


@api.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _data: object) -> None:
    _recent.append(text.decode("utf-8", "replace"))


def recent_log() -> str:
    """Return the last lines llama.cpp logged, for an error message."""
    return "".join(_recent).strip()


def last_complaint() -> str:
    """Return the last line of llama.cpp's log that names a fault, else its last line."""
    lines = recent_log().splitlines()
    faults = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
    return (faults or lines or ["llama.cpp gave no reason"])[-1].strip()


@functools.cache
def prepare() -> None:
    """Probe the library and start its backends, once; raises `BackendError` on a mismatch."""
    api.llama_log_set(_log, ctypes.c_void_p(0))
    parameters = api.llama_context_default_params()
    for name, expected in _DEFAULTS.items():
        found = getattr(parameters, name, None)
        if found != expected:
            raise BackendError(
                f"llama-cpp-python {api.__version__} does not fit: its default {name} reads as "
                f'{found}, expected {expected}; install "llama-cpp-python>=0.3.36,<0.4"'
            )
    if api.llama_max_parallel_sequences() != _N_SEQUENCES_MOST:
        raise BackendError(
            f"llama.cpp allows {api.llama_max_parallel_sequences()} sequences, expected "
            f'{_N_SEQUENCES_MOST}; install "llama-cpp-python>=0.3.36,<0.4"'
        )
    api.llama_backend_init()


def can_offload() -> bool:
    """Return whether the installed library can put layers on a GPU."""
    return bool(api.llama_supports_gpu_offload())


@functools.cache
def may_repack() -> bool:
    """Return whether weights may be laid out anew for special kernels.

    Not where the library was built with AMX: there the layout leads to tile instructions, and
    on virtual machines that announce them without keeping their state they end the process.
    """
    return b"AMX_INT8 = 1" not in bytes(api.llama_print_system_info())


def switch_tiles_off() -> None:
    """Let K-quants be multiplied row by row whatever the number of tokens, for good.

    llama.cpp looks once per process, when it computes for the first time: too late has no effect.
    """
    os.environ["GGML_CPU_TILED_MM"] = "0"


def build() -> str:
    """Return what names this build of llama.cpp, for the header of saved states."""
    version = api.llama_version()
    text = version.decode() if isinstance(version, bytes) else str(version)
    return f"{api.__version__}/{text}"


def function_addresses(names: Sequence[str]) -> dict[str, int]:
    """Return the addresses of llama.cpp's functions in the library that is already loaded."""
    library = api.llama_cpp._lib
    addresses = {}
    for name in names:
        function = getattr(library, name, None)
        if function is None:
            raise BackendError(f"llama-cpp-python {api.__version__} has no function {name}")
        addresses[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return addresses
