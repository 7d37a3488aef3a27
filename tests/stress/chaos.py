"""Does a run go on after any death, and how soon? The demo under 100 kills of processes of every kind.

    python tests/stress/chaos.py [--kills 100] [--runs 5] [--steps 60] [--seed 0] [--layouts 0 1 2 3]
                                 [setting=value ...]

Each run is `python -m asyncrl.launch chaos async_ppo`, in turn (0) on one training rank with one server and worker, (1)
on one with two of both, (2) on two ranks with two of both, and (3) on two ranks with two trained policies and a pool of
older versions; the kills are shared out among the runs. A run passes if it finished by itself, its rollout counts
balance and the audit of its files finds nothing: no rollout trained twice or too old, no token by the wrong policy. A
kill is survived if its run passed, or at least made another step after it.

Per kind of death: the median and the worst time from the kill until the replacement did its job (a process of the
brain: until the next train step), and until the next train step. Target: all survived.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Sample, Tokenizer
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward

POLICIES = "policies=[{name: judge, trained: true}, {name: past, versions: {every: 3, keep: 2}}]"
LAYOUTS = (
    ("trainer.parallel=d1", "generation.servers=1", "rollout.workers=1"),
    ("trainer.parallel=d1", "generation.servers=2", "rollout.workers=2"),
    ("trainer.parallel=d2", "generation.servers=2", "rollout.workers=2"),
    ("trainer.parallel=d2", "rollout.workers=2", POLICIES, f"agent.path={Path(__file__).resolve()}:play"),
)
SETTINGS = ("experiment_name=chaos", "logging.tensorboard=false", "eval.interval=20", "checkpoint.interval=5")
KILLS_ALONE = ("--pauses=0", "--cuts=0", "--delays=0", "--full-disks=0")
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Run:
    """A run that ended: whether it passed, its kills as `--json` tells them, and why it did not pass."""

    layout: str
    seed: int
    passed: bool
    faults: list[dict[str, Any]]
    wrong: list[str]


async def play(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer) -> list[Sample]:
    """One answer of each policy, as the agent of layout 3; each is paid for its own."""
    samples: list[Sample] = []
    for policy in (client, client.policy("judge"), client.policy("past")):
        asked = GenerationRequest(f"{prompt.prompt_id}/{prompt.member}", prompt.input_ids, 1, prompt.sampling)
        (answer,) = (await policy.generate(asked)).completions
        samples += policy.samples(arithmetic_reward(prompt.data, tokenizer.decode(answer.token_ids)))
    return samples


def run(number: int, layout: Sequence[str], kills: int, steps: int, seed: int, root: Path, more: Sequence[str]) -> Run:
    """One run with so many kills."""
    reported = root / f"{number}.json"
    settings = [*SETTINGS, *layout, f"total_train_steps={steps}", f"fileroot={root}", *more]
    options = [f"--kills={kills}", f"--seed={seed}", f"--json={reported}", *KILLS_ALONE]
    command = [sys.executable, "-m", "asyncrl.launch", "chaos", "async_ppo", *options, *settings]
    code = subprocess.run(command, stdout=sys.stderr, timeout=LIMIT_S, check=False).returncode
    if not reported.is_file():
        raise SystemExit(f"the chaos command ended with {code} before it could say what happened")
    found = json.loads(reported.read_text())
    return Run(" ".join(layout), seed, code == 0, found["faults"], found["wrong"])


@dataclass(frozen=True)
class Kind:
    """Results of the kills of one kind; times in seconds."""

    kind: str
    kills: int
    survived: int
    at_work: tuple[float, float] | None
    """Median and worst."""
    next_step: tuple[float, float] | None
    rollouts_lost: int
    steps_again: int


def by_kind(runs: Sequence[Run]) -> Iterator[Kind]:
    """The figures of each kind of death, then of all."""
    kills = [(fault, run) for run in runs for fault in run.faults]
    kinds = sorted({_kind(fault) for fault, _ in kills})
    for name in [*kinds, "all"]:
        of_kind = [(fault, run) for fault, run in kills if name in (_kind(fault), "all")]
        faults = [fault for fault, _ in of_kind]
        yield Kind(
            name,
            len(faults),
            sum(run.passed or fault["next_step_s"] is not None for fault, run in of_kind),
            _figures(fault["at_work_s"] for fault in faults),
            _figures(fault["next_step_s"] for fault in faults),
            sum(fault["rollouts"] for fault in faults),
            sum(fault["steps_again"] for fault in faults),
        )


def _kind(fault: dict[str, Any]) -> str:
    return str(fault["fault"]["target"].partition("/")[0])


def _figures(values: Iterator[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (statistics.median(known), max(known)) if known else None


def table(kinds: Sequence[Kind]) -> str:
    """The figures for a person, and for docs/results.md."""
    columns = ("killed", "survived", "at work again", "next step", "rollouts lost", "steps again")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {each.kind} | {each.survived} of {each.kills} | {_shown(each.at_work)} | {_shown(each.next_step)} "
        f"| {each.rollouts_lost} | {each.steps_again} |"
        for each in kinds
    ]
    return "\n".join(lines)


def _shown(figures: tuple[float, float] | None) -> str:
    return "-" if figures is None else f"{figures[0]:.1f} s ({figures[1]:.1f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="train steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--layouts", type=int, nargs="+", choices=range(len(LAYOUTS)), default=range(len(LAYOUTS)))
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    args = parser.parse_args()
    shares = [args.kills // args.runs + (number < args.kills % args.runs) for number in range(args.runs)]
    layouts = cycle(LAYOUTS[number] for number in args.layouts)
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder:
        runs = [
            run(number, layout, kills, args.steps, args.seed + number, Path(folder), args.overrides)
            for number, (kills, layout) in enumerate(zip(shares, layouts, strict=False))
        ]
    print(table([*by_kind(runs)]))
    passed = sum(each.passed for each in runs)
    print(f"\n{passed} of {len(runs)} runs passed")
    for each in runs:
        for line in each.wrong:
            print(f"FAILED: seed {each.seed}, {each.layout}: {line}")
    return 0 if passed == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
