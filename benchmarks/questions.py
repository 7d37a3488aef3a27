"""Questions that users of such systems asked, each answered by one command on a recorded run.

    python benchmarks/questions.py [--only RUN ...] [--out questions.md]

Each run is the demo, real and short, with what the questions are about: a setting, user code, or something that is done
to it from outside while it goes on. The commands read the files that it left, or leaves meanwhile. What they print
goes into a page, shortened to the lines that answer. `docs/troubleshooting.md` lists the symptoms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from doctor import COMMON, USER_CODE, processes

from asyncrl.config.load import load_supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model

MORE_CODE = """

from asyncrl.plugins.agents.single_turn import SingleTurnAgent

KEPT = []


async def keeps(data, completion):
    KEPT.append(b"x" * (128 << 10))
    await asyncio.sleep(2.0)
    return float(completion.count("1"))


def naps(data, completion):
    time.sleep(0.06)
    return float(completion.count("1"))


async def slower_for_long_ones(data, completion):
    await asyncio.sleep(30.0 if len(completion) > 60 else 0.0)
    return float(completion.count("1"))


class Straggler(SingleTurnAgent):
    "Its seventieth prompt never ends."

    async def run_group(self, prompt, make_env, client):
        if prompt.order == 70 and not prompt.prompt_id.startswith("rehearsal-"):
            await asyncio.sleep(3600)
        return await super().run_group(prompt, make_env, client)
"""
FOUND_S, RUN_S, LOOK_S = 240.0, 300.0, 3.0
WIDTH = 100


@dataclass(frozen=True)
class Run:
    """A run to record.

    Attributes:
        what: it is, for readers.
        settings: beside those of `doctor.COMMON`.
        steps: it trains so many, and ends.
        disturb: called with the run's folder after `after` steps. The doctor is then asked until it names `until`, and
            the run is ended.
    """

    what: str
    settings: tuple[str, ...] = ()
    steps: int = 14
    disturb: Callable[[Path], None] | None = None
    after: int = 4
    until: str = ""


@dataclass(frozen=True)
class Question:
    """A question, where it was asked, the run and the command that answer, and the parts of the output to show: the
    findings of these kinds, and the lines of these stages.
    """

    text: str
    where: str
    run: str
    findings: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


def stop(kind: str) -> Callable[[Path], None]:
    """Suspend the processes of a kind, as a hang does; wait until there is one."""

    def suspend(run: Path) -> None:
        while not (found := processes(run, kind)):
            time.sleep(0.1)
        for process in found:
            process.suspend()

    return suspend


def kill_all(run: Path) -> None:
    """Kill all processes of the run at once, as a host that goes down does."""
    for process in _tree(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def nothing(run: Path) -> None:
    """The run is disturbed by its own code."""


def _tree(run: Path) -> list[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        if f"trial_name={run.name}" in (process.info["cmdline"] or []):
            return [process, *process.children(recursive=True)]
    return []


RUNS = {
    "demo": Run("The demo", (), 60),
    "few_places": Run("Two rollouts at a time", ("rollout.max_concurrent=2",), 26),
    "small_batch": Run("A server's batch of 8", ("generation.max_running_requests=8",), 8),
    "tiny_cache": Run("A KV cache of 600 positions", ("generation.max_total_tokens=600",), 8),
    "eta_0": Run("η = 0", ("max_head_offpolicyness=0",), 20),
    "blocking": Run("A coroutine that blocks for 0.1 s", ("reward.path={code}:blocks",), 5),
    "leak": Run("A reward that keeps 0.13 MB for each answer", ("reward.path={code}:keeps",), 60),
    "failing": Run(
        "A reward that fails on half of the rows", ("reward.path={code}:fails", "rollout.rehearse=false"), 8
    ),
    "threads": Run("One thread for a reward of 0.06 s", ("reward.path={code}:naps", "rollout.user_code.threads=1"), 6),
    "drops": Run(
        "η = 1, `on_stale=drop`, and a reward that takes 30 s for long answers",
        ("reward.path={code}:slower_for_long_ones", "max_head_offpolicyness=1", "on_stale=drop"),
        20,
    ),
    "collapse": Run("A learning rate 200 times too large", ("optimizer.lr=0.02", "optimizer.schedule=constant"), 20),
    "stopped_rank": Run("The training rank is stopped", (), 1000, stop("model_worker"), until="stalled"),
    "stopped_server": Run("The server is stopped", (), 1000, stop("generation_server"), until="stalled"),
    "straggler": Run(
        "An agent that never ends one of its prompts", ("agent.path={code}:Straggler",), 1000, nothing, 1, "stalled"
    ),
    "no_server": Run("The server is stopped while it loads", (), 1000, stop("generation_server"), 0, "no-step-yet"),
    "killed": Run("All processes are killed at once", (), 1000, kill_all, until="died"),
}
QUESTIONS = (
    Question(
        "Both idle ratios are near 0 and it is slower than synchronous: who is the bottleneck?",
        "verl-project/verl/issues/6693",
        "demo",
        ("slow-generation", "trainer", "balanced", "no-cpu", "too-few-places"),
        ("trainer", "gate full", "places", "generation"),
    ),
    Question(
        'It hangs after "starting", devices idle.', "verl-project/verl/issues/3895", "no_server", ("no-step-yet",)
    ),
    Question(
        "It hangs after a random number of steps.", "verl-project/verl/issues/7180", "stopped_server", ("stalled",)
    ),
    Question(
        "Is this step slow, or will it never end? Which rollout is waited for?",
        "verl-project/verl/issues/7155",
        "straggler",
        ("stalled",),
    ),
    Question(
        "Generation failed, and the run was reported complete.",
        "verl-project/verl/issues/6387",
        "failing",
        ("rewards-that-always-fail",),
    ),
    Question(
        "Is this really on-policy at staleness 0?", "verl-project/verl/issues/4449", "eta_0", (), ("age of tokens",)
    ),
    Question(
        "Generation dominates: 72 % of the step.",
        "verl-project/verl/issues/6747",
        "small_batch",
        ("server-batch-too-small",),
        ("generation",),
    ),
    Question(
        "4 times slower than another framework, wait ratio 0.5.",
        "THUDM/slime/issues/1072",
        "tiny_cache",
        ("kv-cache-too-small",),
        ("trainer", "generation_server/0"),
    ),
    Question(
        'It hangs after the rollout phase; the last line is "train start".',
        "THUDM/slime/issues/1487",
        "stopped_rank",
        ("stalled",),
    ),
    Question(
        "A step takes two hours: the server, or tools? (It was a client that blocks.)",
        "THUDM/slime/issues/1332",
        "blocking",
        ("blocked-event-loop",),
        ("generation", "reward"),
    ),
    Question("Memory rises until it is used up: which process?", "THUDM/slime/issues/638", "leak", ("memory-grows",)),
    Question(
        "One to two hours in rollout: is it normal, what do I change?",
        "areal-project/AReaL/issues/137",
        "few_places",
        ("too-few-places",),
        ("places",),
    ),
    Question(
        "The off-policy limit is never reached.",
        "PrimeIntellect-ai/prime-rl/issues/2812",
        "few_places",
        ("eta-never-reached",),
        ("age of tokens",),
    ),
    Question(
        "15,000 tokens a second become 500 after the barrier: 16 running, 0 waiting.",
        "PrimeIntellect-ai/prime-rl/pull/1372",
        "eta_0",
        ("eta-too-small",),
        ("gate full", "generation_server/0"),
    ),
    Question(
        "The reward collapses: is it staleness?",
        "PrimeIntellect-ai/prime-rl/issues/964",
        "collapse",
        ("entropy-collapses", "nothing-learnt", "old-data"),
        ("age of tokens",),
    ),
    Question(
        "Most of the time is generation.", "huggingface/trl/issues/2971", "demo", ("slow-generation",), ("generation",)
    ),
    Question("The weight transfer hangs for ever.", "huggingface/trl/issues/6796", "stopped_server", ("stalled",)),
    Question(
        "One straggler of a group, and the step never fills.", "NVIDIA-NeMo/RL/issues/3238", "straggler", ("stalled",)
    ),
    Question(
        "Asynchronous, yet trainer and servers take turns.",
        "alibaba/ROLL/issues/394",
        "eta_0",
        ("eta-too-small",),
        ("trainer", "gate full"),
    ),
    Question("Agent training is stuck after 10 steps.", "alibaba/ROLL/issues/215", "threads", ("blocked-user-code",)),
    Question(
        "It hangs after five hours, no error, memory flat.", "modelscope/ms-swift/issues/6962", "killed", ("died",)
    ),
    Question(
        "Slots saturated, queued or starved? Time of publishing? Discarded by age?",
        "Tencent-Hunyuan/UniRL/issues/455",
        "demo",
        (),
        ("trainer", "places", "generation_server/0", "age of tokens"),
    ),
    Question(
        "Long rollouts are generated again and rarely reach a batch.",
        "thinking-machines-lab/tinker-cookbook/pull/822",
        "drops",
        ("stale-drops",),
        ("age of tokens",),
    ),
    Question(
        "Weight sync took 147 s, 100 s of it a pause that nobody saw.",
        "marin-community/marin/issues/8936",
        "demo",
        (),
        ("trainer", "generation_server/0"),
    ),
)


def recorded(name: str, run: Run, root: Path) -> dict[str, object]:
    """Do a run and have its files judged: what `doctor RUN --json` says."""
    code = root / "injected.py"
    code.write_text(USER_CODE + MORE_CODE)
    folder = root / "async_ppo" / name
    own = {each.partition("=")[0] for each in run.settings}
    settings = [each for each in COMMON if each.partition("=")[0] not in own]
    settings += [each.format(code=code) for each in run.settings]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, f"fileroot={root}", f"trial_name={name}"]
    command += [f"model.path={ensure_base_model(load_supervised('arithmetic_base'))}", f"total_train_steps={run.steps}"]
    with (root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            if run.disturb is None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine fewer steps have to do
                    process.wait(RUN_S)
                return judged(folder)
            _wait_for_steps(folder, run.after, process)
            run.disturb(folder)
            return _until(folder, run.until)
        finally:
            for each in _tree(folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(60)


def judged(folder: Path) -> dict[str, object]:
    """What the doctor says of a run."""
    command = [sys.executable, "-m", "asyncrl.launch", "doctor", str(folder), "--json"]
    told: dict[str, object] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return told


def _wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + RUN_S
    while steps and (not metrics.exists() or metrics.read_bytes().count(b"\n") < steps):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{folder.name}: no {steps} steps; its output is beside its folder")
        time.sleep(0.2)


def _until(folder: Path, kind: str) -> dict[str, object]:
    """Ask the doctor until it names `kind` with what it knows of processes."""
    deadline = time.monotonic() + FOUND_S
    while True:
        time.sleep(LOOK_S)
        told = judged(folder) if (folder / "config.yaml").exists() else {"findings": []}
        kinds = [each["kind"] for each in told["findings"]]  # type: ignore[attr-defined]
        waited = kind != "no-step-yet" or time.monotonic() > deadline - FOUND_S + 45.0
        if kind in kinds and waited:
            return told
        if time.monotonic() > deadline:
            raise SystemExit(f"{folder.name}: the doctor does not name {kind}, but {kinds}")


def answer(question: Question, told: dict[str, object]) -> list[str]:
    """The lines of the doctor's output that answer a question; raises LookupError if there are none."""
    lines: list[str] = []
    for each in told["findings"]:  # type: ignore[attr-defined]
        if each["kind"] in question.findings:
            sentence = re.sub(r"/\S+/injected\.py", "my_code.py", each["sentence"])
            lines += textwrap.wrap(f"{each['title']}: {sentence}", WIDTH)
            for more in filter(None, (each["advice"], each["gain"])):
                lines += textwrap.wrap(f"  → {more}", WIDTH, subsequent_indent="    ")
    if question.findings and not lines:
        raise LookupError(f"{question.where}: none of {question.findings} on {question.run}")
    for each in told["stages"]:  # type: ignore[attr-defined]
        if each["name"].strip() in question.stages:
            share = "   ?" if each["use"] is None else f"{100 * each['use']:3.0f} %"
            lines.append(f"{each['name']:<20} {share}  {each['figures']}")
    return lines


def page(found: dict[str, dict[str, object]]) -> str:
    """The page of all questions; of runs that were not recorded the findings alone."""
    parts = [HEAD]
    for number, question in enumerate(QUESTIONS, 1):
        told, run = found.get(question.run), RUNS[question.run]
        kinds = question.findings
        if told is not None:
            kinds = tuple(each["kind"] for each in told["findings"] if each["kind"] in question.findings)  # type: ignore[attr-defined]
        links = ", ".join(f"[{kind}](docs/troubleshooting.md#{kind})" for kind in kinds)
        project, number_there = question.where.split("/")[1], question.where.rsplit("/", 1)[1]
        asked = f"Asked in [{project}#{number_there}](https://github.com/{question.where})."
        finding = f" Finding: {links}." if links else ""
        parts.append(f"## {number}. {question.text}\n\n{asked}{finding}")
        if told is None:
            parts.append(f" No run is recorded yet: {_lower(run.what)}.\n\n")
            continue
        lines = "\n".join(answer(question, told))
        parts.append(f" Recorded run: {_lower(run.what)}; {told['state']}, step {told['step']}.\n\n")
        parts.append(f"```text\n$ asyncrl doctor RUN\n{lines}\n```\n\n")
    return "".join(parts).rstrip("\n") + "\n"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


HEAD = """# Questions

For users whose run is slow, hangs or learns badly: 24 questions from public issues of systems like this one, and the
answer of one command here. Sentences are as the command prints them; lines that do not answer the question are left
out. Each finding has its section in [troubleshooting](docs/troubleshooting.md); more is on the
[dashboard](docs/dashboard.md).

`python benchmarks/questions.py` made this page from real runs of the demo on two busy cores.

"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="RUN", help="runs to do again")
    parser.add_argument("--out", type=Path, default=Path("questions.md"))
    parser.add_argument("--kept", type=Path, help="what the doctor said, by run: is read and completed")
    args = parser.parse_args()
    found = json.loads(args.kept.read_text()) if args.kept and args.kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-questions-") as folder:
        for name, run in RUNS.items():
            if name in found and name not in (args.only or ()):
                continue
            if args.only and name not in args.only:
                continue
            found[name] = recorded(name, run, Path(folder))
            kinds = ", ".join(each["kind"] for each in found[name]["findings"])
            print(f"{name}: step {found[name]['step']}, {kinds}", flush=True)
            if args.kept:
                args.kept.write_text(json.dumps(found))
    for question in QUESTIONS:
        if question.run in found:
            answer(question, found[question.run])
    args.out.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
