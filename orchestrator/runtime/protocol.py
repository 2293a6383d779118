"""What a runtime is: sequences of tokens in a shared pool of cells, and their evaluation.

Two runtimes keep this contract, `llama` (llama.cpp) and `simulated`; one test suite runs over
both. A runtime checks every argument before it acts: a refused call raises and changes nothing.
It knows no checkpoints, no requests and no text beyond its own vocabulary.

Invariants of every runtime:
- a sequence holds the tokens fed to it, at positions 0, 1, …, without gaps;
- a copy shares cells and never evaluates anything;
- a recurrent state exists only at the end of its sequence and is never cut back;
- a sequence of rows without their state is *incomplete*: one that is being restored in slices, or a
  holder. It is never evaluated, never copied or saved as if it were whole. Its rows may be copied
  (`copy_rows`), cut anywhere, saved (`save_rows`) and added to (`restore_rows`), and a state makes
  it complete (`restore_state`);
- rows and state of a sequence come from the same tokens. A runtime remembers which tokens it was
  fed, and nothing is saved under other ones or put over rows of other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.runtime.sampling import GREEDY as GREEDY
from orchestrator.runtime.sampling import Sampling as Sampling
from orchestrator.runtime.sampling import TokenLogprob as TokenLogprob
from orchestrator.text.tokenizer import Tokenizer

MemoryKind = Literal["attention", "windowed", "hybrid", "recurrent"]
"""What of a sequence can be cut, and what takes cells.

attention  rows only, cut anywhere
windowed   rows only, but what lies behind a sliding window may be gone: never cut
hybrid     rows and a recurrent state, never cut
recurrent  a state only, which takes no cells, never cut
"""


@dataclass(frozen=True, slots=True)
class Model:
    """What a loaded model is. `fingerprint` (32 bytes) tells two model files apart."""

    name: str
    architecture: str
    memory: MemoryKind
    n_vocab: int
    n_context_train: int
    fingerprint: bytes
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runtime holds.

    `n_sequences` ids from 0; `n_cells` positions in the shared pool; `n_context` tokens in one
    sequence; `n_batch` tokens in one decode call; `state_bytes` of recurrent state per sequence;
    `cell_bytes` of attention rows per token. On a pure recurrent model a token takes no cell.
    `n_joint` sequences in one decode call (0: all); `sliced`: rows can be moved in parts;
    `copies`: a sequence can be copied to another, else states move through host memory only;
    `mixes`: a decode call may hold any chunks, else one token per sequence or one longer chunk;
    `snapshots`: a recurrent state can be kept apart from its rows, on hybrid memory alone.
    """

    n_sequences: int
    n_cells: int
    n_context: int
    n_batch: int
    state_bytes: int
    cell_bytes: int
    n_joint: int = 0
    sliced: bool = True
    copies: bool = True
    mixes: bool = True
    snapshots: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """One lane's span in one decode call: `tokens` go to positions `start`, `start` + 1, …

    `wants_logits`: the last token's logits are needed, to sample what comes next.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    wants_logits: bool

    @property
    def end(self) -> int:
        """The length of the sequence once this chunk is evaluated."""
        return self.start + len(self.tokens)


class Sampler(Protocol):
    """Chooses tokens for one lane; holds its penalties, its grammar and its random generator."""

    def sample(self, row: int) -> int:
        """Return the next token from `row` of the latest decode call, and remember it.

        Raises `BackendError` when the row holds values that are not finite, and of these
        `GrammarFailed` where no token fits the lane's grammar, though its states are sound.
        """
        ...

    @property
    def last_logprob(self) -> TokenLogprob | None:
        """How likely the token sampled last was; None before it and without `logprobs`."""
        ...

    def close(self) -> None:
        """Free what it holds; closing twice is harmless."""
        ...


class Runtime(Protocol):
    """Sequences, their evaluation, and their states. Used from one thread only."""

    @property
    def model(self) -> Model:
        """The model that is loaded."""
        ...

    @property
    def limits(self) -> Limits:
        """The sizes this runtime was opened with."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary; usable from any thread."""
        ...

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Evaluate `chunks` in one call and append them to their sequences.

        Returns one row per chunk, None where no logits were asked for; rows are valid until the
        next decode. Raises `InvalidArgument` for a chunk that does not start at its sequence's
        length or a batch over `n_batch`; `PoolFull` when cells are missing, with nothing
        changed; `DecodeFailed` when every state must be thought lost.
        """
        ...

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return a copy of one row of the latest decode, shape (n_vocab,)."""
        ...

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise `InvalidArgument` for what this model cannot do; to be called from any thread.

        That is a bias on tokens it does not have, a grammar that cannot be followed, and a schema
        that cannot be turned into one. Cheap where none of these is set.
        """
        ...

    def sampler(self, sampling: Sampling, history: Sequence[int]) -> Sampler:
        """Return a sampler; `history` are the tokens its penalties already see.

        Raises `InvalidArgument` where `check_sampling` would.
        """
        ...

    def length(self, sequence: int) -> int:
        """Return how many tokens the sequence holds, 0 when it is empty."""
        ...

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make the empty `target` share the cells of `source`, all or the first `length`.

        A shorter `length` than the source's is refused where a recurrent state would be cut.
        """
        ...

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Make the empty `target` share the first `length` rows of `source`, without a state.

        Only where `Limits.snapshots`. The source may be complete or not and keeps what it holds;
        the target is incomplete. Nothing is evaluated and no data copied.
        """
        ...

    def strip(self, sequence: int) -> None:
        """Take away the state of a complete sequence, which is incomplete then: a holder.

        Only where `Limits.snapshots`. It no longer keeps a recurrent cell.
        """
        ...

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens; refused where a recurrent state would be cut.

        Rows without a state are cut anywhere, save those of a sliding window.
        """
        ...

    def clear(self, sequence: int) -> None:
        """Empty one sequence."""
        ...

    def scrub(self, sequence: int) -> None:
        """Empty a sequence whose state may not be finite, so that its cell is safe to reuse."""
        ...

    def reset(self) -> None:
        """Empty every sequence and overwrite what they held."""
        ...

    def save(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """Return rows, state and `tokens` (all the sequence holds) as one checked blob.

        Other tokens than it was fed raise `InvalidArgument`, here and in the two below.
        """
        ...

    def restore(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Fill the empty `sequence` from a blob saved with the same `tokens`.

        Raises `StateRefused` naming the field that differs, or `PoolFull`; the sequence is
        empty after either.
        """
        ...

    # The same in slices, so that no single call takes long: the rows a few hundred at a time,
    # then the state, on export as on import. `tokens` are always all tokens of the sequence; a
    # slice is tied to those up to its end, since its rows depend on every one of them, and so it
    # may serve any longer sequence that begins with the same.

    def save_rows(self, sequence: int, start: int, end: int, tokens: Sequence[int]) -> bytes:
        """Return the rows of positions [start, end) as one checked blob.

        Only where `Limits.sliced`. The sequence may be incomplete and keeps what it holds.
        """
        ...

    def save_state(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """Return the recurrent state alone; where there is none, a blob that only checks.

        Refused only where there are rows that cannot be sliced.
        """
        ...

    def restore_rows(self, sequence: int, start: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Append a slice to `sequence`, which holds exactly `start` rows of earlier slices.

        The sequence is then incomplete; `length` tells its rows so far. Raises `StateRefused`,
        with field ``"rows"`` where those held were made from other tokens, or `PoolFull`; the
        *whole* sequence is empty after either.
        """
        ...

    def restore_state(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Complete a sequence whose rows are those of all `tokens`.

        On pure recurrent memory, which has no rows, this is the only step and the sequence must
        be empty. Raises `StateRefused`, with field ``"rows"`` where the rows were made from other
        tokens; the whole sequence is empty then.
        """
        ...

    def close(self) -> None:
        """Free the context and the model; closing twice is harmless."""
        ...
