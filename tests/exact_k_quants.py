"""Is a model with K-quants exact once tiles are off? A program, run by `test_exact`.

K-quants come in blocks of 256, and only where a row has several do tiles give other bits, so the
tiny llama is built wider than usual; llama.cpp itself quantises it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import tiny_blocks

tiny_blocks.N_EMBD, tiny_blocks.N_FF = 512, 1024  # before anything else takes them over

import tiny_models  # noqa: E402
from test_exact import CUTTINGS, read, say, text_of  # noqa: E402

from orchestrator.engine.exactness import exacted  # noqa: E402
from orchestrator.models.inspect import inspect  # noqa: E402
from orchestrator.runtime.exact import SINGLE  # noqa: E402
from orchestrator.runtime.llama import Settings, open_llama  # noqa: E402

Q4_K_M = 15  # llama_ftype


def quantised(folder: Path) -> Path:
    plain, path = folder / "plain.gguf", folder / "q4_k_m.gguf"
    tiny_models.write(plain, "llama", None)
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = Q4_K_M
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), parameters):
        raise SystemExit("llama.cpp did not quantise the model")
    return path


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(Path(folder))
        file = inspect(path)
        assert {"Q4_K", "Q6_K"} <= set(file.tensor_types)
        runtime = open_llama(path, exacted(file, Settings(n_context=512, n_sequences=8, threads=1)))
        assert runtime.passes != SINGLE, "tiles are still on"
        text = text_of(runtime, 1, 200)
        logits = say(runtime, text)
        for lane, sizes in enumerate(CUTTINGS):
            assert np.array_equal(read(runtime, lane, text, sizes), logits[-1])
        runtime.close()


if __name__ == "__main__":
    main()
