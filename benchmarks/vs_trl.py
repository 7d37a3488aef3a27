"""asyncrl against TRL on one job: seconds a step, seconds to two accuracies, peak memory.

    python benchmarks/vs_trl.py [--job demo] [--seeds 1 2 3] [--slow-reward] [--own-steps 40] [--only NAME] [--out DIR]
                                [--steps 8] [setting=value ...]

The job `demo` is the demo: the same base model, rows, reward, batch of 32 prompts with 8 answers each in four
minibatches, the same learning rate and its schedule, on the same two cores. `smollm2` is `smollm2_sentence`, a real
chat model: 16 prompts with 8 answers each, in the type that asyncrl chooses there (bfloat16: TRL as an autocast). TRL
runs `peers/trl_job.py` in an environment of its own, in DIR, made at the first run with the versions named below. The
two take turns, seed by seed; figures are medians.

Evaluation is on nobody's clock: the policy of every second step is kept, by TRL's job while its clock stands still, by
asyncrl as a checkpoint while its clock goes on, and after the run all are asked the same held-out problems, greedily,
by the same code. Clocks start when the model is loaded: TRL's as it begins to train, asyncrl's as its server takes the
first request. Memory is what the processes of a run have in main memory together, shared pages once, looked at every
two seconds. `--slow-reward`: every verdict takes 0.1 to 3 s (log-normal, median 0.3 s), all of a batch at the same time
in both. `--own-steps`: asyncrl's steps, and so its schedule's, where they are not TRL's.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from common import Table, demo_model, parser
from transformers import AutoModelForCausalLM

from asyncrl.api import RewardFunction, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.datasets import Dataset, load_dataset
from asyncrl.data.prompt_format import PromptFormat, load_chat_template
from asyncrl.data.settings import DatasetConfig
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.launch.commands.export.policy import export
from asyncrl.observe.history import History
from asyncrl.observe.observer import Activity
from asyncrl.observe.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer

TORCH, TRL = "torch==2.13.0", "trl==1.16.0"
EVALUATE_EVERY = 2
WARM_UP_STEPS = 5
LEAST_STEPS = WARM_UP_STEPS + 2
HELD_OUT = {"demo": 1024, "smollm2": 256}
"""Problems: of 1,024 an accuracy of 0.9 has a standard error of 0.009."""
SLOW = (0.1, 3.0, 0.3)
"""Least, most and median seconds of a verdict."""
LIMIT_S = 3 * 3600.0
"""Of one run; 32 steps of TRL on the real chat model take 65 minutes on two cores with AVX-512."""
LOOK_S = 2.0
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """What both do: the settings of an experiment, the model that they train, and the problems that policies are asked.

    Attributes:
        steps: of TRL, and of asyncrl unless told otherwise.
        until: accuracies, the seconds to which are measured.
    """

    name: str
    experiment: str
    config: ExperimentConfig
    model: Path
    held_out: Dataset
    reward: RewardFunction
    steps: int
    until: tuple[float, float]

    @property
    def max_new_tokens(self) -> int:
        """The longest answer, in training and to held-out problems."""
        return self.config.rollout.sampling.max_new_tokens

    def accuracy(self, policy: Path) -> float:
        """Greedy, on the held-out problems, of the policy in a folder with the tokenizer and template of the model."""
        torch.set_num_threads(1)  # several wait for each other where cores are busy
        config = ReferenceConfig(sampling=SamplingParams(max_new_tokens=self.max_new_tokens))
        prompts = PromptFormat(load_tokenizer(self.model), load_chat_template(self.model, DatasetConfig()))
        model = AutoModelForCausalLM.from_pretrained(policy)
        return ReferenceTrainer(config, model, prompts, self.held_out, self.reward).greedy_accuracy(self.held_out)


def demo() -> Job:
    """Return the demo's job; its base model is made first if there is none."""
    config = load_experiment("async_ppo", [])
    assert isinstance(config, ExperimentConfig)
    problems = ArithmeticDataset(split="held_out", num_rows=HELD_OUT["demo"])
    return Job("demo", "async_ppo", config, demo_model(), problems, arithmetic_reward, 40, (0.5, 0.9))


def smollm2() -> Job:
    """Return the job of a real chat model, which `asyncrl install smollm2` made."""
    config = load_experiment("smollm2_sentence", [])
    assert isinstance(config, ExperimentConfig)
    model, steps = Path(config.model.path or "").expanduser(), config.total_train_steps
    problems = load_dataset(config.dataset.path, {"num_rows": HELD_OUT["smollm2"]}, "held_out", 0)
    reward = load_plugin(config.reward.path)
    return Job("smollm2", "smollm2_sentence", config, model, problems, reward, steps, (0.5, 0.8))


JOBS = {"demo": demo, "smollm2": smollm2}


@dataclass(frozen=True)
class Outcome:
    """One run: median seconds a step after the first five; seconds to each accuracy of the job (None: not reached);
    the curve: steps, seconds and accuracy of every policy that was kept; most memory of its processes, in bytes."""

    step_s: float
    to_accuracy_s: tuple[float | None, ...]
    curve: list[tuple[int, float, float]]
    memory_bytes: int

    @property
    def accuracy(self) -> float:
        """Accuracy of the last policy."""
        return self.curve[-1][2]


def trl_python(out: Path) -> Path:
    """The interpreter with TRL; installed where it is not yet."""
    python = out / "trl-env" / "bin" / "python"
    if not (out / "trl-env" / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(out / "trl-env")], check=True)
        for package in (TORCH, TRL):  # torch first: what depends on it then keeps the build that is there
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
        (out / "trl-env" / "complete").touch()
    return python


def write_rows(job: Job, file: Path, count: int, seed: int) -> Path:
    """`count` rows of the job's dataset as JSON lines."""
    dataset = load_dataset(job.config.dataset.path, {"num_rows": count}, "train", seed)
    file.write_text("".join(json.dumps(dict(dataset.row(index))) + "\n" for index in range(count)))
    return file


def watched(command: Sequence[str], output: Path) -> tuple[int, int]:
    """Run a command; return its exit code and the most main memory that its processes had together, in bytes."""
    most = 0
    with open(output, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            root = psutil.Process(process.pid)
            for _ in range(int(LIMIT_S / LOOK_S)):
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(LOOK_S), most
                used = 0
                for each in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):  # it has just ended
                        used += each.memory_full_info().pss
                most = max(most, used)
        finally:
            process.terminate()
    raise SystemExit(f"{command} had not ended after {LIMIT_S:.0f} s; see {output}")


def run_trl(job: Job, seed: int, steps: int, slow: bool, out: Path) -> Outcome:
    """One run of TRL."""
    scratch, config = out / f"trl-{job.name}-seed{seed}{'-slow' if slow else ''}", job.config
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    job_file: dict[str, Any] = {
        "job": job.name,
        "model": str(job.model),
        "bf16": config.model.dtype == "bfloat16",
        "rows": str(write_rows(job, scratch / "rows.jsonl", 16384, seed)),
        "log": str(scratch / "log.jsonl"),
        "scratch": str(scratch),
        "seed": seed,
        "steps": steps,
        "threads": 2,
        "prompts": config.train_batch_size,
        "group_size": config.group_size,
        "minibatches": config.trainer.ppo_minibatches,
        "lr": config.optimizer.lr,
        "schedule": config.optimizer.schedule,
        "warmup_steps": config.optimizer.warmup_steps,
        "max_new_tokens": job.max_new_tokens,
        "keep_every": EVALUATE_EVERY,
        "slow_reward": SLOW if slow else None,
    }
    (scratch / "job.json").write_text(json.dumps(job_file, indent=1))
    command = [str(trl_python(out)), str(HERE / "peers" / "trl_job.py"), str(scratch / "job.json")]
    code, memory_bytes = watched(command, scratch / "output.txt")
    events = [json.loads(line) for line in (scratch / "log.jsonl").read_text().splitlines()]
    if code != 0 or len(events) < steps:
        raise SystemExit(f"TRL ended with {code} after {len(events)} steps; see {scratch / 'output.txt'}")
    seconds = [event["seconds"] for event in events]
    curve = [
        (step, seconds[step - 1], job.accuracy(scratch / f"v{step}"))
        for step in range(EVALUATE_EVERY, steps + 1, EVALUATE_EVERY)
    ]
    return outcome(job, seconds, curve, memory_bytes)


def run_asyncrl(job: Job, seed: int, steps: int, slow: bool, out: Path, overrides: Sequence[str]) -> Outcome:
    """One run of asyncrl."""
    trial = f"asyncrl-{job.name}-seed{seed}{'-slow' if slow else ''}"
    settings = [f"fileroot={out}", "experiment_name=vs_trl", f"trial_name={trial}", "resume=restart", f"seed={seed}"]
    settings += [f"model.path={job.model}", f"total_train_steps={steps}", "logging.tensorboard=false"]
    settings += ["eval.interval=0", f"checkpoint.interval={EVALUATE_EVERY}", f"checkpoint.keep={steps}"]
    if slow:
        # As many at a time as the gate lets in: they wait for verdicts, not for the engine.
        settings += [f"reward.path={HERE / 'peers' / 'slow_reward.py'}:slow_reward", "rollout.max_concurrent=160"]
    run_dir = out / "vs_trl" / trial
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "asyncrl.launch", job.experiment, *settings, *overrides]
    code, memory_bytes = watched(command, out / f"{trial}.txt")
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    if code != 0 or len(rows) != steps:
        raise SystemExit(f"asyncrl ended with {code} after {len(rows)} steps; see {run_dir / 'logs'}")
    before_s = rows[0]["time/elapsed_s"] - _seconds_of_first_step(run_dir)
    seconds = [row["time/elapsed_s"] - before_s for row in rows]
    curve = []
    for step in range(EVALUATE_EVERY, steps + 1, EVALUATE_EVERY):
        with tempfile.TemporaryDirectory() as folder:
            export(run_dir, step, Path(folder) / "policy")
            curve.append((step, seconds[step - 1], job.accuracy(Path(folder) / "policy")))
    return outcome(job, seconds, curve, memory_bytes)


def _seconds_of_first_step(run_dir: Path) -> float:
    """From when the generation server takes requests until the end of the first step."""
    history = History(run_dir)
    lines = history.processes["generation_server/0"].lines
    return history.steps[1].at - min(float(line["since"]) for line in lines if line["activity"] == Activity.serves)


def outcome(job: Job, seconds: Sequence[float], curve: list[tuple[int, float, float]], memory_bytes: int) -> Outcome:
    """Summarise a run from the end times of its steps, in seconds, and its kept policies."""
    steps = [after - before for before, after in itertools.pairwise(seconds[WARM_UP_STEPS:])]
    to_s = tuple(next((at for _, at, found in curve if found >= until), None) for until in job.until)
    return Outcome(statistics.median(steps), to_s, curve, memory_bytes)


def median(values: Sequence[float | None]) -> float | None:
    """The median; None where a run did not get there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def main() -> None:
    """Run both, print the table."""
    command = parser(__doc__)
    command.add_argument("--job", choices=JOBS, default="demo")
    command.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    command.add_argument("--slow-reward", action="store_true", help="of the demo")
    command.add_argument("--out", type=Path, default=Path.home() / ".cache" / "asyncrl" / "vs_trl")
    command.add_argument("--own-steps", type=int, help="of asyncrl, where they are not TRL's")
    command.add_argument("--only", choices=("asyncrl", "TRL"), help="one of the two")
    command.add_argument("--steps", type=int, help="of both, where they are not the job's")
    command.add_argument("overrides", nargs="*", metavar="setting=value", help="of asyncrl")
    options = command.parse_args()
    if options.slow_reward and options.job != "demo":
        command.error("--slow-reward is the demo's")
    if any(each is not None and each < LEAST_STEPS for each in (options.steps, options.own_steps)):
        command.error(f"a step is timed after the first {WARM_UP_STEPS}: give at least {LEAST_STEPS}")
    options.out.mkdir(parents=True, exist_ok=True)
    job, slow, out = JOBS[options.job](), options.slow_reward, options.out
    steps = options.steps or job.steps
    runs: dict[str, list[Outcome]] = {name: [] for name in ("asyncrl", "TRL") if options.only in (None, name)}
    for seed in options.seeds:
        for name, made in runs.items():
            if name == "TRL":
                made.append(run_trl(job, seed, steps, slow, out))
            else:
                made.append(run_asyncrl(job, seed, options.own_steps or steps, slow, out, options.overrides))
            print(f"seed {seed}: {name} {made[-1]}", file=sys.stderr, flush=True)
    show(job, runs)


def show(job: Job, runs: dict[str, list[Outcome]]) -> None:
    """Print the medians, and TRL's as multiples of ours where both ran."""
    to = [f"seconds to {until:.2f}" for until in job.until]
    table = Table("", "seconds a step", *to, "memory, GiB", "accuracy in the end")
    figures: dict[str, list[float | None]] = {}
    for name, made in runs.items():
        reached = [median(each) for each in zip(*(run.to_accuracy_s for run in made), strict=True)]
        memory = statistics.median(run.memory_bytes for run in made) / 2**30
        figures[name] = [median([run.step_s for run in made]), *reached, memory]
        cells = ["not reached" if value is None else f"{value:.2f}" for value in figures[name]]
        table.row(name, *cells, f"{statistics.median(run.accuracy for run in made):.3f}")
    if len(figures) == 2:
        pairs = zip(figures["TRL"], figures["asyncrl"], strict=True)
        table.row("ratio", *("-" if a is None or b is None else f"{a / b:.2f} x" for a, b in pairs), "")


if __name__ == "__main__":
    main()
