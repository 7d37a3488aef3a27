"""Verdicts of the maths reward per second and core, straight and through a process of the pool.

    python benchmarks/reward_throughput.py [--seconds 5]

Answers are of three kinds: plain numbers, notations (units, fractions, percentages, LaTeX), and expressions that go
through math-verify; right and wrong ones by turns. The target, 500 a second and core, is for a mix as GSM8K's: 90 %
numbers, 8 % notations, 2 % expressions. Through the pool one process is asked, call by call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import uvloop
from common import Table, parser, verdict

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
REWARD = CodeTarget("asyncrl.plugins.rewards.math_answer:math_answer_reward", {})


def problems(kinds: Sequence[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Rows and completions without end, of `kinds` by turns."""
    turns = {kind: itertools.cycle(pairs) for kind, pairs in KINDS.items()}
    for kind in itertools.cycle(kinds):
        expected, given = next(turns[kind])
        yield {"answer": f"Some steps that lead there.\n#### {expected}"}, f"First this, then that. \\boxed{{{given}}}"


def straight(kinds: Sequence[str], seconds: float) -> float:
    """Verdicts per second of this process's CPU time."""
    asked = problems(kinds)
    for _ in kinds:  # imports math-verify
        math_answer_reward(*next(asked))
    begun, count = time.process_time(), 0
    while time.process_time() - begun < seconds:
        math_answer_reward(*next(asked))
        count += 1
    return count / (time.process_time() - begun)


async def pooled(seconds: float) -> float:
    """Verdicts per second of the mix through one process."""
    pool, asked = ProcessPool(1, ProcessLimits(4 << 30, 33, 1 << 30)), problems(MIX)
    for _ in MIX:
        await pool.call("reward", REWARD, "answer", list(next(asked)), 60.0)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        await pool.call("reward", REWARD, "answer", list(next(asked)), 60.0)
        count += 1
    await pool.close()
    return count / (time.monotonic() - begun)


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = command.parse_args()
    table = Table("answers", "verdicts/s", f">= {TARGET}")
    for kind in KINDS:
        table.row(kind, f"{straight([kind], args.seconds):.0f}", "")
    mix = straight(MIX, args.seconds)
    table.row("mix", f"{mix:.0f}", verdict(mix, TARGET, at_least=True))
    table.row("mix through the pool", f"{uvloop.run(pooled(args.seconds)):.0f}", "")


if __name__ == "__main__":
    main()
