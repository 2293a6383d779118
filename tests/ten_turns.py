"""Ten turns of a chat, with kept states and without: what is evaluated, and how long one waits.

``scripts/ten-turns [MODEL]`` prints one row a turn. Both engines answer greedily and are asked in
turn, so that what else the machine does meanwhile falls on both.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from test_chats import QUESTIONS

from orchestrator import Engine
from orchestrator.engine.request import GREEDY, Outcome

N_REPLY = 40  # tokens at most
ROW = "{:>4}  {:>7}  {:>10}  {:>10}  {:>9}  {:>9}  {}"


def first_token(outcome: Outcome) -> float:
    """Return the seconds to the first text."""
    return outcome.timings.time_to_first_token or 0.0


def main(model: str | Path) -> None:
    """Hold the chat and print the table."""
    print(
        ROW.format("turn", "prompt", "evaluated", "no cache", "first s", "no cache", "same reply")
    )
    totals = [0, 0]
    with ExitStack() as stack:
        warm = stack.enter_context(Engine.open(model))
        cold = stack.enter_context(Engine.open(model, checkpoints=0))
        messages: list[dict[str, object]] = []
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            a, b = (
                engine.chat(messages, sampling=GREEDY, max_tokens=N_REPLY).outcome()
                for engine in (warm, cold)
            )
            messages.append({"role": "assistant", "content": b.text})
            evaluated = a.usage.prefilled_tokens, b.usage.prefilled_tokens
            totals = [total + more for total, more in zip(totals, evaluated, strict=True)]
            waits = f"{first_token(a):.2f}", f"{first_token(b):.2f}"
            same = "yes" if a.tokens == b.tokens else "no"
            print(ROW.format(number, a.usage.prompt_tokens, *evaluated, *waits, same), flush=True)
    print(ROW.format("all", "", *totals, "", "", ""))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
