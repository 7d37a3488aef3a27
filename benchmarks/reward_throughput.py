"""Verdicts of the maths reward per second and core, straight and through a process of the pool.

    python benchmarks/reward_throughput.py [--seconds S] [--json PATH]

Answers are of three kinds: plain numbers, notations (units, fractions, percentages, LaTeX), and expressions that go
through math-verify; right and wrong ones by turns. The target, 500 a second and core, is for a mix as GSM8K's: 90 %
numbers, 8 % notations, 2 % expressions. Through the pool one process is asked, call by call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from asyncrl.plugins.rewards.math_answer import math_answer_reward
from asyncrl.rollout.user_code_pool.child import CodeTarget
from asyncrl.rollout.user_code_pool.process_pool import ProcessLimits, ProcessPool

TARGET = 500
KINDS = {
    "numbers": [("18", "18"), ("1,200", "1200"), ("42", "41"), ("7", "70")],
    "notations": [("18", r"18\text{ dollars}"), ("50", r"50\%"), ("1/2", r"\frac{1}{2}"), ("3", r"\$4"), ("12", "1,2")],
    "expressions": [("x+1", "1+x"), (r"2\sqrt{2}", r"\sqrt{8}"), ("(1,2]", "(1,2)"), (r"\{1,2\}", r"\{2,1\}")],
}
MIX = ["numbers"] * 45 + ["notations"] * 4 + ["expressions"]
TARGET_PATH = "asyncrl.plugins.rewards.math_answer:math_answer_reward"


def problems(kinds: list[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Rows and completions without end, of `kinds` by turns."""
    turns = {kind: itertools.cycle(pairs) for kind, pairs in KINDS.items()}
    for kind in itertools.cycle(kinds):
        expected, given = next(turns[kind])
        yield {"answer": f"Some steps that lead there.\n#### {expected}"}, f"First this, then that. \\boxed{{{given}}}"


def straight(kinds: list[str], seconds: float) -> float:
    """Verdicts per second of this process's CPU time."""
    asked = problems(kinds)
    for _ in range(len(kinds)):  # imports math-verify
        math_answer_reward(*next(asked))
    begun, count = time.process_time(), 0
    while time.process_time() - begun < seconds:
        math_answer_reward(*next(asked))
        count += 1
    return count / (time.process_time() - begun)


async def pooled(seconds: float) -> float:
    """Verdicts per second of the mix through one process."""
    pool, asked, target = (
        ProcessPool(1, ProcessLimits(4 << 30, 33, 1 << 30)),
        problems(MIX),
        CodeTarget(TARGET_PATH, {}),
    )
    for _ in range(len(MIX)):
        await pool.call("reward", target, "answer", list(next(asked)), 60.0)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        await pool.call("reward", target, "answer", list(next(asked)), 60.0)
        count += 1
    await pool.close()
    return count / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    rates = {kind: straight([kind], args.seconds) for kind in KINDS}
    rates["mix"] = straight(MIX, args.seconds)
    rates["mix through the pool"] = uvloop.run(pooled(args.seconds))
    print(f"{'answers':24}{'verdicts/s':>12}   target")
    for name, rate in rates.items():
        target = f"{TARGET}  {'met' if rate >= TARGET else 'MISSED'}" if name == "mix" else ""
        print(f"{name:24}{rate:12.0f}   {target}")
    if args.json:
        args.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
