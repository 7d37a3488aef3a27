"""A tiny model, whole runs of the system as child processes, and what the test command says of tests it left out."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hypothesis
import psutil
import pytest

from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.run_dir import CHECKPOINTS_DIR, OBSERVED_DIR, versions_in
from asyncrl.observe.metrics.glossary import NO_FIGURES, find, find_figure
from asyncrl.observe.status import ProcessHistory
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.trials.memory_checkpoint import prefix_of

from .examples import examples
from .further_cases import is_further
from .proofs import keeps_proofs, proven_once
from .rewriting import rewrite_a_share
from .warm import RUN_VARIABLE, Template, WarmProcess, python_of_hosts, stand_in

# Protobuf chooses its implementation when first imported, by TensorBoard in one test and by etcd3 in others, which
# loads beside this one only. Chosen here, the order of the tests does not matter.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")

# Tests assert behaviour, never time; and what they look at is the same each time. To look further:
# ASYNCRL_EVERY_CASE=1 pytest --hypothesis-profile=explore
_NO_TIME = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("asyncrl", derandomize=True, max_examples=examples(100), **_NO_TIME)
hypothesis.settings.register_profile("explore", **_NO_TIME)
hypothesis.settings.load_profile("asyncrl")

SHARED_MEMORY = Path("/dev/shm")
LIMIT_S = 600.0
"""Time limit in seconds of waits for what must come: it ends a hang, and does not measure how fast a machine is."""
GONE_S = 120.0
"""Time limit in seconds of waits for what must go: a process that has ended, its last words, its memory."""
CHAT_MODEL = Path(os.environ.get("ASYNCRL_SMOLLM2", "~/.cache/asyncrl/models/SmolLM2-135M-Instruct")).expanduser()
"""A real chat model, where `python -m asyncrl.launch install smollm2` has made it."""
_STEP = re.compile(r"step (\d+)/")

# of SGLang's command in tests (see tests/forked_sglang/sitecustomize.py)
SGLANG_ENV = {"PYTHONPATH": str(Path(__file__).parent / "forked_sglang")}
if os.environ.get("ASYNCRL_COLD_TESTS"):
    SGLANG_ENV.clear()
SETTINGS: dict[str, Any] = {
    "experiment_name": "tiny",
    "train_batch_size": 4,
    "group_size": 2,
    "total_train_steps": 6,
    "max_head_offpolicyness": 2,
    "trainer.ppo_minibatches": 2,
    "rollout.max_concurrent": 8,
    "rollout.sampling.max_new_tokens": 16,
    "dataset.max_prompt_tokens": 32,
    "generation.max_running_requests": 16,
    "generation.max_total_tokens": 2048,
    "eval.interval": 3,
    "eval.size": 8,
    "checkpoint.interval": 2,
    "logging.tensorboard": "false",
    "system.start_timeout_s": 240,  # of a busy machine
    "system.stall_timeout_s": 600,
}
REQUIRED_METRICS = {
    "step",
    "policy_version",
    "reward/mean",
    "staleness/max",
    "staleness/mean",
    "tokens/trained",
    "time/step_s",
    "time/train_s",
    "time/wait_for_batch_s",
    "throughput/gen_tokens_per_s",
    "throughput/train_tokens_per_s",
    "ppo/clip_fraction",
    "ppo/behave_imp_weight_mean",
    "ppo/behave_kl",
    "entropy",
    "grad_norm",
    "lr",
    "rollout/len_mean",
    "rollout/dropped_stale",
    "rank/memory_bytes",
    "rank/mfu",
}
REWARD = """
def even_digits(data, completion):
    "A reward that a random model gets in part, so that groups have variance."
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
"""

TO_INCLUDE = {
    "sglang": (
        "no SGLang",
        "launchers/install_sglang_cpu.sh .venv-sglang && "
        'ASYNCRL_SGLANG_PYTHON="$PWD/.venv-sglang/bin/python" make test',
    ),
    "verifiers": (
        "no verifiers",
        "launchers/install_verifiers.sh 0.2.1 .venv-verifiers && "
        "launchers/install_verifiers.sh 0.4.0 .venv-verifiers-v1 openenv && "
        'ASYNCRL_VERIFIERS_CLASSIC_PYTHON="$PWD/.venv-verifiers/bin/python" '
        'ASYNCRL_VERIFIERS_V1_PYTHON="$PWD/.venv-verifiers-v1/bin/python" make test',
    ),
    "programs": (
        "no such agent program, or no SmolLM2",
        "python -m asyncrl.launch install programs && python -m asyncrl.launch install smollm2 && make test",
    ),
    "metaworld": (
        "no Meta-World",
        "python -m venv .venv-metaworld && .venv-metaworld/bin/pip install metaworld==3.1.1 imageio && "
        'ASYNCRL_METAWORLD_PYTHON="$PWD/.venv-metaworld/bin/python" make test',
    ),
    "smollm2": ("no SmolLM2", "python -m asyncrl.launch install smollm2 && make test"),
    "etcd": ("no etcd", "apt-get install etcd-server && make test"),
    "gpu": ("no CUDA device", "make test, on a machine with an NVIDIA GPU"),
    "network": ("takes minutes", "ASYNCRL_NETWORK_TESTS=1 make test, as root"),
    "every_case": ("another case of what is tried", "ASYNCRL_EVERY_CASE=1 make test"),
}
"""By marker: what tests with it lack where they are skipped, and the command that includes them."""
ASKED_FOR = {"network": "ASYNCRL_NETWORK_TESTS", "every_case": "ASYNCRL_EVERY_CASE"}
"""By marker: the environment variable without which tests with it are skipped."""


LONGEST_FILES = (
    *("test_layouts", "test_generation_contract", "test_every_architecture", "test_verifiers", "test_offload"),
    *(
        "test_gpu_benchmark",
        "test_memory_and_checkpoints",
        "test_every_picture_model",
        "test_parity",
        "test_host_agents",
    ),
    *("test_supervisors", "test_supervisor", "test_dashboard_browser", "test_engine_pictures", "test_engine_turns"),
    *("test_engine_states", "test_any_death", "test_embedded_server", "test_base_model", "test_records"),
    *("test_manager_process", "test_name_etcd", "test_comm_name_resolve", "test_bottleneck", "test_functions"),
    *("test_hosts", "test_process_death", "test_chaos", "test_sglang_run", "test_hosts_ray", "test_etcd_outage"),
    *("test_hosts_own_disks", "test_slurm_job", "test_tools", "test_hosts_slurm", "test_wheel", "test_join"),
    *("test_vlm_run", "test_embodied_run", "test_user_code", "test_oracle", "test_full_disk", "test_programs"),
    *("test_fastest_split", "test_documented_snippets", "test_adapters", "test_prefix_tree", "test_export"),
    *("test_engine_logprobs", "test_routing_replay", "test_supervised", "test_every_model", "test_metrics"),
    *("test_rewards", "test_vla", "test_reference", "test_checkpoints", "test_user_code_pool", "test_pictures"),
    *("test_trained_policies", "test_mcp", "test_model_worker", "test_reference_loop", "test_rehearsal"),
    *("test_preferences", "test_compiled", "test_audit", "test_any_schedule", "test_engine", "test_sizing"),
)
"""These begin first, so that no worker of pytest is left alone with one at the end; or last, where time is short."""
UNTIL = "ASYNCRL_TESTS_UNTIL"
"""Environment variable: the time, in seconds since 1970, after which no test begins any more."""
TOGETHER = (
    "test_hosts.py",
    "test_hosts_ray.py",
    "test_oracle.py",
    "test_slurm_job.py",
    "test_tools.py",
    "test_wheel.py",
)
"""Whole runs whose file has something that takes long to make: a cluster, a model, a package."""


WHOLE_RUNS = ("tests/e2e/", "tests/faults/")
RUNS_AT_ONCE = 0.6
"""Part of pytest's workers that begins with whole runs, which wait; the others begin with tests that compute."""


class StopsEarly:
    """Ends the suite at the first failure that is no whole run's: those may be tried again (`.ci/rerun.py`)."""

    def __init__(self, config: pytest.Config) -> None:
        self._run = config.pluginmanager.getplugin("dsession")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not report.nodeid.startswith(WHOLE_RUNS):
            self._run.shouldstop = f"{report.nodeid} failed, which is no whole run"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a file's tests stay on one worker of pytest; whole runs, each a minute long, need not.

    `RUNS_AT_ONCE` of the workers take whole runs as long as there are any, and the others take the other tests, so that
    processors which a run leaves idle have something to compute.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling
    from xdist.workermanage import WorkerController

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file.startswith(WHOLE_RUNS) and not file.endswith(TOGETHER) else file

        def _assign_work_unit(self, node: WorkerController) -> None:
            runs = self.nodes.index(node) < int(len(self.nodes) * RUNS_AT_ONCE)
            fitting = (scope for scope in self.workqueue if scope.startswith(WHOLE_RUNS) == runs)
            if (scope := next(fitting, None)) is not None:
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    config.pluginmanager.register(StopsEarly(config))
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What each worker of pytest would do itself is done once. Nothing that is made here is garbage."""
    gc.disable()
    try:
        rewrite_a_share(session.config.args)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs may take their time on a busy machine; the limit of the other tests is too short to tell why.

    Hosts that are cut off cost minutes of waiting, and further cases of what is tried hours of computing, which only
    who asks for them has.
    """
    order = {name: place for place, name in enumerate(LONGEST_FILES)}
    if UNTIL in os.environ:
        items.sort(key=lambda item: (-order.get(item.path.stem, len(order)), "tests/unit/" not in item.nodeid))
    else:
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        if is_further(item.nodeid):
            item.add_marker(pytest.mark.every_case)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
        for marker, variable in ASKED_FOR.items():
            if item.get_closest_marker(marker) and not os.environ.get(variable):
                item.add_marker(pytest.mark.skip(TO_INCLUDE[marker][0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Where time is short, what would begin too late is skipped, before its fixtures are made."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(f"no time left ({UNTIL})")


def pytest_collection_finish() -> None:
    """What is there by now stays: the garbage collector passes over it from now on, here and in ranks that are forked,
    which would copy all of it otherwise. And it looks for the little that tests leave less often: it took a twelfth of
    their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per reason for which tests were skipped."""
    for line in skip_lines(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


def skip_lines(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Return a line for each reason for skipped tests: their number, the reason, and how to include them."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in skipped:
        _, _, reason = cast(tuple[str, int, str], report.longrepr)
        of_a_test = isinstance(report, pytest.TestReport) and UNTIL not in reason
        markers = TO_INCLUDE.keys() & set(report.keywords) if of_a_test else set()
        counts[TO_INCLUDE[min(markers)] if markers else (reason.removeprefix("Skipped: "), "")] += 1
    return [
        f"{count} skipped: {reason}" + (f"; to include them: {command}" if command else "")
        for (reason, command), count in sorted(counts.items())
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8, and tools in tests say what is none."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(scope="session")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which results of proofs are kept."""
    return tmp_path_factory.mktemp("proofs")


@pytest.fixture(scope="module", autouse=True)
def equal_models_are_proven_once(request: pytest.FixtureRequest, proofs: Path) -> Iterator[None]:
    """Where engines are what is tested, and not the proofs."""
    with proven_once(proofs) if keeps_proofs(request.path) else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Commands that are called in this process make what they write private; the next test begins as this one did."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def make_tiny_model(folder: Path) -> Path:
    """Make a Hugging Face folder: a random Qwen2 of 20k parameters with the arithmetic alphabet."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from asyncrl.data.tokenizers import CharTokenizer

    tokenizer = CharTokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random Qwen2 of 20k parameters with the arithmetic alphabet."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def make_tiny_moe(folder: Path) -> Path:
    """Make the same of a random Mixtral: four experts, two of which each token goes through."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    from asyncrl.data.tokenizers import CharTokenizer

    tokenizer = CharTokenizer()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a random Mixtral: four experts, two of which each token goes through."""
    return make_tiny_moe(tmp_path_factory.mktemp("tiny_moe"))


@pytest.fixture(scope="session")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Hugging Face folders of random vision-language models, by family (`tests.tiny_vlm.KINDS`), each made once."""
    root, made = tmp_path_factory.mktemp("vlm"), dict[str, Path]()

    def folder(kind: str) -> Path:
        from tests.tiny_vlm import make_folder

        if kind not in made:
            made[kind] = make_folder(kind, root / kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tests.device_cases.Folders`."""
    from tests.device_cases import Folders

    return Folders(tmp_path_factory.mktemp("models"))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random Qwen2 with a byte-level BPE tokenizer of its own and ChatML as its template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("tiny_chat_model")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rows = (Path(__file__).parents[1] / "experiments" / "gsm8k_rows.jsonl").read_text(encoding="utf-8")
    backend.train_from_iterator([CHATML, *rows.splitlines()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, a real chat model."""
    if not (CHAT_MODEL / "config.json").is_file():
        pytest.skip(f"no SmolLM2 in {CHAT_MODEL}")
    return CHAT_MODEL


@pytest.fixture
def http_security(tmp_path: Path) -> HttpSecurity:
    """Token and certificate of a run of this test's own."""
    return RunSecret.create(tmp_path / "secret").http()


class Run:
    """One `python -m asyncrl.launch <experiment>` as a child, with what it printed and what it started.

    A setting that `overrides` gives as None stays what the experiment says. `experiment` may go on with options;
    `inside` is what the command line begins with, to run it in a place of its own. `template` forks its processes.
    """

    def __init__(
        self,
        root: Path,
        overrides: dict[str, Any],
        experiment: str = "async_ppo",
        inside: Sequence[str] = (),
        template: Template | None = None,
    ) -> None:
        settings = SETTINGS | {"fileroot": root} | overrides
        self.run_dir = root / str(settings["experiment_name"]) / str(settings.get("trial_name", "trial0"))
        arguments = [f"{name}={value}" for name, value in settings.items() if value is not None]
        arguments = [*experiment.split(), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[str] | WarmProcess
        if template is not None:
            self.process = template.launch(arguments, environment)
        else:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "asyncrl.launch", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=environment,
            )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, limit_s: float = LIMIT_S, *, times: int = 1) -> None:
        """Wait until a line with `text` was printed, so many times."""
        self._wait_for(lambda: sum(text in line for line in self.lines) >= times, repr(text), limit_s)

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        """Wait until this step was shown, or a later one: what is attached to a run begins in its middle."""
        self._wait_for(lambda: self._shown_step() >= step, f"step {step}", limit_s)
        self.remember_processes()

    def wait_for_file(self, name: str, limit_s: float = LIMIT_S) -> None:
        """Wait until there is a file or folder `name` in the run's folder."""
        self._wait_to_see((self.run_dir / name).exists, name, limit_s)

    def wait_for_checkpoint(self, limit_s: float = LIMIT_S) -> None:
        """Wait until there is a checkpoint; of which version the run may have decided by then."""
        checkpoints = self.run_dir / CHECKPOINTS_DIR
        self._wait_to_see(lambda: bool(versions_in(checkpoints)), CHECKPOINTS_DIR, limit_s)

    def _wait_to_see(self, so: Callable[[], bool], what: str, limit_s: float) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + limit_s
        while not so():
            over = self._ended or time.monotonic() > deadline
            if over and not so():  # it may have come between the two looks
                pytest.fail(f"no {what} with:\n{self.output}")
            pause.wait(0.05)
        self.remember_processes()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; returns the exit code."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {limit_s} s:\n{self.output}\n{self.logs()}")
        self._reader.join(GONE_S)
        return code

    def remember_processes(self) -> dict[str, psutil.Process]:
        """Everything below the launcher now, by title; nothing once it has ended."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return {}
        self.seen |= {process.pid: process for process in found}
        titles = {}
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended; a zombie has no title
                titles[" ".join(process.cmdline())] = process
        return titles

    def worker(self, name: str) -> psutil.Process:
        """The worker `<kind>/<index>`; one that has just been started is waited for until it has its title."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            titles = self.remember_processes()
            found.extend(process for title, process in titles.items() if title.startswith(f"asyncrl {name} "))
            return bool(found)

        _poll(lambda: is_there() or self._ended, LIMIT_S)
        assert found, f"no {name} in:\n{self.output}"
        return found[0]

    def survivors(self) -> list[str]:
        """Return the processes that still run of all that were seen; each has a moment to end."""
        _poll(lambda: not any(map(_runs, self.seen.values())), GONE_S)
        return [f"{process.pid} {_title(process)}" for process in self.seen.values() if _runs(process)]

    def metrics(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir / "metrics.jsonl")

    def unexplained(self) -> set[str]:
        """The metrics and figures of the run that are not in the glossary."""
        observed = ProcessHistory(self.run_dir / OBSERVED_DIR)
        observed.refresh()
        figures = {name for process in observed.processes.values() for line in process.lines for name in line}
        metrics = {name for row in self.metrics() for name in row}
        return {name for name in metrics if find(name) is None} | {
            name for name in figures - NO_FIGURES if find_figure(name) is None
        }

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the train steps."""
        return [row for row in self.metrics() if row["step"]]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def logs(self) -> str:
        """The ends of all logs, for a failing assertion's message."""
        return "\n".join(
            f"--- {f.name}\n{f.read_text()[-1500:]}" for f in sorted((self.run_dir / "logs").glob("*.log"))
        )

    def kill_tree(self) -> None:
        """SIGKILL everything at once; it has ended when this returns, and writes nothing any more."""
        if self.process.poll() is None:
            self.remember_processes()
            self.process.kill()
        for process in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LIMIT_S)
        _poll(lambda: not any(map(_runs, self.seen.values())), LIMIT_S)

    @property
    def _ended(self) -> bool:
        return not self._reader.is_alive() or self.process.poll() is not None

    def _shown_step(self) -> int:
        """The last step that was shown; -1: none."""
        return max((int(found[1]) for line in self.lines if (found := _STEP.match(line))), default=-1)

    def _wait_for(self, so: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until the printed lines make it `so`."""
        deadline = time.monotonic() + limit_s
        while not so() and not self._ended and time.monotonic() < deadline:
            with self._changed:
                self._changed.wait_for(lambda: so() or self._ended, 1.0)
        if self._ended:  # what it printed last may not be read yet
            _poll(lambda: so() or not self._reader.is_alive(), GONE_S)
        assert so(), f"no {what} in:\n{self.output}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "it has just ended"


def _poll(so: Callable[[], bool], limit_s: float) -> None:
    """Wait until it is `so`, or the limit is over."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not so() and time.monotonic() < deadline:
        pause.wait(0.05)


def left_in_memory(run_dir: Path, before: set[Path]) -> list[str]:
    """Shared memory that came since `before` and is of this run, or that no living process uses. Other runs may go on
    beside the test; they have folders there, and files for the moment between making and mapping them: so what is left
    was there at every look.
    """

    def now() -> set[Path]:
        used = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):  # the process has ended
                used |= {Path(line.split()[-1]) for line in maps.read_text().splitlines() if str(SHARED_MEMORY) in line}
        unused = set(SHARED_MEMORY.iterdir()) - before - used
        return {path for path in unused if not path.is_dir() or path.name.startswith(prefix_of(run_dir))}

    left = now()

    def is_gone() -> bool:
        left.intersection_update(now())
        return not left

    _poll(is_gone, GONE_S)
    return sorted(map(str, left))


StartRun = Callable[..., Run]


@pytest.fixture(scope="session")
def template() -> Iterator[Template | None]:
    """Yield the template from which the processes of runs are forked; None if they import everything themselves."""
    if sys.platform != "linux" or os.environ.get("ASYNCRL_COLD_TESTS"):
        yield None
        return
    runs = (RUN_VARIABLE, "PYTEST_XDIST_TESTRUNUID")
    template = Template(next((os.environ[name] for name in runs if name in os.environ), str(os.getpid())))
    yield template
    template.close()


@pytest.fixture(scope="session")
def python_there(template: Template | None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter for other hosts, which are this machine: processes of runs are forked from the template there."""
    return sys.executable if template is None else str(python_of_hosts(template, tmp_path_factory.mktemp("python")))


@pytest.fixture(scope="session")
def warm_python(template: Template | None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose programs begin with what processes of runs import. They are no children of the test."""
    return sys.executable if template is None else str(stand_in(template, tmp_path_factory.mktemp("warm_python")))


StartWorker = Callable[..., subprocess.Popen[str] | WarmProcess]


@pytest.fixture
def start_worker(template: Template | None) -> Iterator[StartWorker]:
    """`start_worker("model_worker", 0, run_dir)` starts this process of a run by itself; it ends with the test."""
    started: list[subprocess.Popen[str] | WarmProcess] = []

    def start(kind: str, index: int, run_dir: Path) -> subprocess.Popen[str] | WarmProcess:
        environment, arguments = os.environ | {"OMP_NUM_THREADS": "1"}, [kind, str(index), "--run-dir", str(run_dir)]
        if template is not None:
            started.append(template.launch(arguments, environment, module="asyncrl.runtime.main"))
        else:
            command = [sys.executable, "-m", "asyncrl.runtime.main", *arguments]
            started.append(subprocess.Popen(command, env=environment, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(GONE_S)


@pytest.fixture
def start_run(tmp_path: Path, tiny_model: Path, template: Template | None) -> Iterator[StartRun]:
    """`start_run(experiment, **overrides)` starts a run of it on the tiny model; dots in names are written as `__`.

    With `cold` its processes are started as a user's are, and not forked from the template.
    """
    (tmp_path / "rewards.py").write_text(REWARD)
    runs: list[Run] = []

    def start(
        experiment: str = "async_ppo", *, inside: Sequence[str] = (), cold: bool = False, **overrides: Any
    ) -> Run:
        settings = {"model.path": tiny_model, "reward.path": f"{tmp_path / 'rewards.py'}:even_digits"}
        settings |= {name.replace("__", "."): value for name, value in overrides.items()}
        runs.append(Run(tmp_path, settings, experiment, inside, None if inside or cold else template))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_tree()
    for run in runs:
        assert not run.unexplained(), "metrics that asyncrl/observe/metrics/glossary.yaml lacks"


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, and all that it printed."""

    code: int
    output: str


Command = Callable[..., Ended]


@pytest.fixture
def command(template: Template | None) -> Command:
    """`command("eval", ...)` runs `python -m asyncrl.launch eval ...` to its end."""

    def run(*arguments: object, limit_s: float = LIMIT_S) -> Ended:
        given = list(map(str, arguments))
        if template is None:
            asked = [sys.executable, "-m", "asyncrl.launch", *given]
            ended = subprocess.run(
                asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False
            )
            return Ended(ended.returncode, ended.stdout)
        process = template.launch(given, os.environ)
        killer = threading.Timer(limit_s, process.kill)
        killer.start()
        output = process.stdout.read()
        killer.cancel()
        return Ended(process.wait(LIMIT_S), output)

    return run


GATED = """
import asyncio
from pathlib import Path

from asyncrl.plugins.agents.single_turn import SingleTurnAgent


class Gated(SingleTurnAgent):
    "Answers the first prompts of the data order, so many as a file says, and all that are not trained on; then waits."

    async def run_group(self, prompt, make_env, client):
        at_once = prompt.prompt_id.startswith(("eval-", "rehearsal-"))
        while not at_once and prompt.order >= int(Path("{file}").read_text()):
            await asyncio.sleep(0.05)
        return await super().run_group(prompt, make_env, client)
"""


class Gate:
    """A run with these `settings` makes so many steps, and then waits until it may make more.

    So what is done to it is done before its end, however fast the machine is.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._file = folder / "gate"
        agent = folder / "gated.py"
        agent.write_text(GATED.format(file=self._file))
        self.settings = {"agent__path": f"{agent}:Gated"}
        self.let_make(steps)

    def let_make(self, steps: int) -> None:
        """Up to this step, of tests' batches."""
        new = self._file.with_suffix(".new")
        new.write_text(str(steps * SETTINGS["train_batch_size"]))
        new.replace(self._file)

    def open(self) -> None:
        """It may go on to its end."""
        self.let_make(100_000)


@pytest.fixture
def gate(tmp_path: Path) -> Callable[[int], Gate]:
    """`gate(steps)`: what a run waits at after so many steps."""
    return lambda steps: Gate(tmp_path, steps)


def interrupt(run: Run) -> None:
    """Ctrl-C at the terminal of `run`."""
    os.kill(run.process.pid, signal.SIGINT)


@pytest.fixture
def ctrl_c() -> Callable[[Run], None]:
    """`ctrl_c(run)` interrupts a run as the terminal would."""
    return interrupt


@pytest.fixture
def required_metrics() -> set[str]:
    """The keys that the row of every train step has at least."""
    return REQUIRED_METRICS
