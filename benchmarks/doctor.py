"""Does the doctor name what is wrong? Real runs of the demo, each with one cause injected.

    python benchmarks/doctor.py [--only NAME ...]

Each run is `python -m asyncrl.launch async_ppo` (`tool_calculator` for the slow tool) with the settings and the user
code below, some with a disturbance from outside: a server that is stopped four fifths of each second, processes that
take the cores, a disk on which every sync takes long. Then
`python -m asyncrl.launch doctor RUN` judges its files. The expected finding has to be the first that is no remark;
where two causes come to the same (a host without cores slows its servers), either is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import Table, parser

from asyncrl.config.load import load_supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model

USER_CODE = '''
import asyncio
import time

from asyncrl.api import Environment
from asyncrl.plugins.tools.calculator import calculator as calculate


def constant(data, completion):
    return 1.0


async def slow(data, completion):
    await asyncio.sleep(3.0)
    return float(completion.count("1"))


async def blocks(data, completion):
    time.sleep(0.1)
    return float(completion.count("1"))


def fails(data, completion):
    if len(data["prompt"]) % 2 == 0:
        raise ValueError("this row has no answer")
    return float(completion.count("1"))


class Slow(Environment):
    def __init__(self, reward):
        pass

    async def reset(self, *, seed=None, options=None):
        return None, {}

    async def step(self, action):
        await asyncio.sleep(2.0)
        return None, float(action.count("1")), True, False, {}

    async def close(self):
        pass


async def calculator(expression: str) -> str:
    """Multiply, add and subtract whole numbers.

    Args:
        expression: for example "12*34+5".
    """
    await asyncio.sleep(3.0)
    return calculate(expression)
'''
SLOW_SYNC_S = 0.5
SLOW_DISK = """
import os
import time

sync = os.fsync


def slow(descriptor):
    time.sleep({seconds})
    sync(descriptor)


os.fsync = slow
"""
COMMON = [
    "eval.interval=0",
    "checkpoint.interval=0",
    "logging.tensorboard=false",
    "logging.display=plain",
    "system.stall_timeout_s=300",
]
LIMIT_S = 240.0
STOPPED_S, GOING_S = 0.8, 0.2


@dataclass(frozen=True)
class Case:
    """An injected cause: what the doctor has to name, settings, number of steps, a disturbance from outside, the
    experiment and its base, and the code that each process runs first, as `sitecustomize`.
    """

    expected: tuple[str, ...]
    settings: tuple[str, ...] = ()
    steps: int = 14
    disturbed: Callable[[Path], contextlib.AbstractContextManager[None]] | None = None
    experiment: str = "async_ppo"
    base: str = "arithmetic_base"
    first: str = ""


def processes(run: Path, kind: str, index: int = 0) -> list[psutil.Process]:
    """The processes of `kind` with this number in the run."""
    title = f"asyncrl {kind}/{index} [{run.parent.name}/{run.name}]"
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.info["cmdline"] or []):
                found.append(process)
    return found


@contextlib.contextmanager
def stopping(run: Path, index: int = 0) -> Iterator[None]:
    """Stop the generation server `index` four fifths of each second once it serves."""
    end = threading.Event()

    def hold() -> None:
        lines = run / "observed" / f"generation_server-{index}.jsonl"
        while not (lines.exists() and "generated_total" in lines.read_text()) and not end.wait(0.2):
            pass
        while not end.wait(GOING_S):
            for process in processes(run, "generation_server", index):
                with contextlib.suppress(psutil.Error):
                    process.suspend()
                    end.wait(STOPPED_S)
                    process.resume()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def busy_cores(run: Path) -> Iterator[None]:
    """Processes that compute all the time, four for each core."""
    count = 4 * (os.cpu_count() or 1)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


CASES = {
    "nothing": Case(("slow-generation", "trainer", "balanced", "no-cpu")),
    "slow reward": Case(("slow-reward",), ("reward.path={code}:slow",), 8),
    "slow environment": Case(("slow-environment",), ("env.path={code}:Slow",), 8),
    "slow tool": Case(
        ("slow-tool",),
        ("tools=[{{path: '{code}:calculator', run_in: loop, timeout_s: 30}}]",),
        8,
        experiment="tool_calculator",
        base="tool_calculator_base",
    ),
    "slow disk": Case(
        ("checkpoint-disk", "publish"), ("checkpoint.interval=1",), 8, first=SLOW_DISK.format(seconds=SLOW_SYNC_S)
    ),
    "a server held up": Case(("slow-server",), (), 10, stopping),
    "one slow server of two": Case(("slow-server",), ("generation.servers=2",), 40, lambda run: stopping(run, 1)),
    "eta = 0": Case(("eta-too-small",), ("max_head_offpolicyness=0",), 20),
    "two places": Case(("too-few-places",), ("rollout.max_concurrent=2",), 10),
    "tiny server batch": Case(("server-batch-too-small",), ("generation.max_running_requests=8",), 8),
    "tiny KV cache": Case(("kv-cache-too-small",), ("generation.max_total_tokens=600",), 8),
    "evaluation each step": Case(("evaluation",), ("eval.interval=1", "eval.size=1500"), 6),
    "trainer-bound": Case(("trainer",), ("trainer.ppo_epochs=12",), 8),
    "blocked event loop": Case(("blocked-event-loop",), ("reward.path={code}:blocks",), 5),
    "no cores left": Case(("no-cpu", "slow-server"), ("system.niceness=5",), 8, busy_cores),
    "a reward that fails": Case(
        ("rewards-that-always-fail",), ("reward.path={code}:fails", "rollout.rehearse=false"), 10
    ),
    "a reward that says nothing": Case(("nothing-learnt",), ("reward.path={code}:constant",), 10),
}


def examined(name: str, case: Case, root: Path) -> tuple[bool, tuple[object, ...]]:
    """Run a case and have it judged; whether the first finding is an expected one, and the row of the table."""
    code = root / "injected.py"
    code.write_text(USER_CODE)
    trial = "".join(letter if letter.isalnum() else "_" for letter in name)
    run = root / case.experiment / trial
    own = [each.format(code=code) for each in case.settings]
    named = {each.partition("=")[0] for each in own}
    settings = [*own, *(each for each in COMMON if each.partition("=")[0] not in named)]
    settings += [f"model.path={ensure_base_model(load_supervised(case.base))}", f"fileroot={root}"]
    settings += [f"trial_name={trial}", f"total_train_steps={case.steps}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if case.first:
        (before := root / f"{trial}_first").mkdir()
        (before / "sitecustomize.py").write_text(case.first)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(before), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "asyncrl.launch"]
    with (root / f"{trial}.log").open("wb") as log, case.disturbed(run) if case.disturbed else contextlib.nullcontext():
        process = subprocess.Popen([*command, case.experiment, *settings], stdout=log, stderr=log, env=environment)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    judged = subprocess.run([*command, "doctor", str(run), "--json"], capture_output=True, check=False)
    told: dict[str, Any] = json.loads(judged.stdout) if judged.stdout else {"findings": [], "step": 0}
    findings = [each for each in told["findings"] if each["level"] != "remark" or each["kind"] == "balanced"]
    first, *others = findings or [{"kind": "nothing", "sentence": ""}]
    right, also = first["kind"] in case.expected, ", ".join(each["kind"] for each in others)
    return right, (told["step"], first["kind"], "yes" if right else "NO", also, first["sentence"])


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    args = command.parse_args()
    table, found = Table("injected", "steps", "doctor says", "right", "also", "figures"), []
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        for name in args.only:
            right, row = examined(name, CASES[name], Path(folder))
            found.append(right)
            table.row(name, *row)
    print(f"{sum(found)} of {len(found)} named")


if __name__ == "__main__":
    main()
