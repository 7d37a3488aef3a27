"""What is killed, cut, filled and refused on several hosts, and the seconds that it costs a run.

    python tests/stress/hosts.py [--tries 3] [--launcher ssh] [--only WORDS ...]

The parts are real: an ssh server whose connections carry the processes of two further hosts (addresses of this
machine), or with `--launcher slurm` a cluster of two nodes, names in an etcd of three members, and the run's folder on
a file system of its own (as root). It needs what the tests of hosts need: etcd, and sshd or Slurm. At the end the run's
audit finds nothing, or the exit code is 1.

The cost of a fault is the time from it to the end of the third step after it, less the time of three steps before it.
Of a refusal it is the time from the command to its exit. A row whose outcome is not the one it states ends the
benchmark with exit code 1. Seconds are of the machine, with whatever else runs there; the least of several tries says
most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' clusters

import psutil

from asyncrl.launch.commands.audit import audit
from tests.conftest import REWARD, Run, interrupt
from tests.e2e.clusters import await_that, slurm, ssh_hosts
from tests.etcd_cluster import EtcdCluster

HOSTS = (
    "[{address: 127.0.0.1, runs: [master_worker, model_worker, gserver_manager]},"
    "{name: %s, address: 127.0.0.2, runs: [generation_server]},"
    "{name: %s, address: 127.0.0.3, runs: [rollout_worker]}]"
)
STEPS = 3
LIMIT_S = 600.0
SILENT_S = 20.0
EXPERIMENT = "hosts"
Fault = Callable[["Started"], contextlib.AbstractContextManager[None] | None]


@dataclass
class Row:
    """One line of the table."""

    what: str
    outcome: str
    seconds: list[float] = field(default_factory=list)

    @property
    def reported(self) -> str:
        """The row as Markdown: median, and least to greatest."""
        least, most = min(self.seconds), max(self.seconds)
        spread = f" ({least:.1f} to {most:.1f})" if len(self.seconds) > 1 else ""
        return f"| {self.what} | {self.outcome} | {statistics.median(self.seconds):.1f} s{spread} |"


@dataclass
class Started:
    """A run over ssh, and what it rests on."""

    run: Run
    etcd: EtcdCluster
    disk: Path | None

    def process(self, kind: str) -> psutil.Process:
        """The process of this kind, wherever it was started from."""
        title = f"asyncrl {kind} [{EXPERIMENT}/"
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found.extend(each for each in psutil.process_iter() if _title(each).startswith(title))
            return bool(found)

        await_that(is_there, kind)
        return found[0]

    def connections(self) -> list[psutil.Process]:
        """The ssh commands of the launcher."""
        children = psutil.Process(self.run.process.pid).children(recursive=True)
        return [each for each in children if _title(each).startswith("ssh ")]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def kill(kind: str) -> Fault:
    return lambda started: started.process(kind).kill()


def kill_supervisor(kind: str) -> Fault:
    def fault(started: Started) -> None:
        supervisor = started.process(kind).parent()
        assert supervisor is not None
        assert "supervisor" in _title(supervisor), supervisor
        supervisor.kill()

    return fault


def cut_connections(started: Started) -> None:
    """All connections of the launcher end at once, as when a switch starts anew."""
    for connection in started.connections():
        connection.kill()


@contextlib.contextmanager
def stopped(kind: str, started: Started) -> Iterator[None]:
    process = started.process(kind)
    process.suspend()
    try:
        time.sleep(SILENT_S)  # the fault, not a wait for something
    finally:
        process.resume()
    yield


def kill_leader(started: Started) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def until_steps_came() -> Iterator[None]:
        leader = started.etcd.leader()
        started.etcd.kill(leader)
        try:
            yield
        finally:
            started.etcd.start(leader)

    return until_steps_came()


@contextlib.contextmanager
def etcd_silent(started: Started) -> Iterator[None]:
    started.etcd.pause()
    try:
        time.sleep(SILENT_S)
    finally:
        started.etcd.resume()
    yield


@contextlib.contextmanager
def disk_full(started: Started) -> Iterator[None]:
    assert started.disk is not None
    ballast = started.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    time.sleep(SILENT_S)
    ballast.unlink()
    yield


FROZEN = f"host is frozen for {SILENT_S:g} s"
AGAIN = "master, manager and ranks begin again at the last step"
FAULTS: list[tuple[str, str, Fault]] = [
    ("nothing is done", "steps go on", lambda _: None),
    ("a GenerationServer is killed on its host", "it is started again there", kill("generation_server/0")),
    ("a RolloutWorker is killed", "it is started again; its prompts are played again", kill("rollout_worker/0")),
    ("a rank is killed", AGAIN, kill("model_worker/0")),
    ("the MasterWorker is killed", AGAIN, kill("master_worker/0")),
    (
        "the GserverManager is killed",
        AGAIN,
        kill("gserver_manager/0"),
    ),
    (
        "a RolloutWorker's supervisor is killed",
        "its process ends; it is started again",
        kill_supervisor("rollout_worker/0"),
    ),
    ("all ssh connections are cut at once", "the processes go on; agents dial by themselves", cut_connections),
    (f"a RolloutWorker's {FROZEN}", "it is waited for", partial(stopped, "rollout_worker/0")),
    (f"a GenerationServer's {FROZEN}", "it is waited for", partial(stopped, "generation_server/0")),
    ("etcd's leader is killed", "the other members are asked", kill_leader),
    (f"all etcd members are silent for {SILENT_S:g} s", "the run continues", etcd_silent),
    (f"the run's disk is full for {SILENT_S:g} s", "it is waited for", disk_full),
]


class Bench:
    """The parts that all rows share."""

    def __init__(self, folder: Path, launcher: dict[str, str], etcd: EtcdCluster, disk: Path | None) -> None:
        self._folder, self._launcher, self.etcd, self.disk = folder, launcher, etcd, disk

    @property
    def is_ssh(self) -> bool:
        return self._launcher["system.launcher"] == "ssh"

    def settings(self, **others: Any) -> dict[str, Any]:
        return {
            "experiment_name": EXPERIMENT,
            "model.path": self._folder / "model",
            "reward.path": f"{self._folder / 'rewards.py'}:even_digits",
            "total_train_steps": 100_000,
            "eval.interval": 0,
            "system.name_resolve": "etcd3",
            "system.name_resolve_root": self.etcd.address,
            **self._launcher,
            **others,
        }

    def start(self, **others: Any) -> Run:
        root = (self.disk or self._folder) / "runs"
        root.mkdir(mode=0o700, exist_ok=True)
        return Run(root, self.settings(**others))


def measured(run: Run, started: Started, fault: Fault) -> float:
    """Seconds that three steps take longer than the three before the fault."""
    before = run._shown_step()
    run.wait_for_step(before + 1, LIMIT_S)
    began = time.monotonic()
    run.wait_for_step(before + 1 + STEPS, LIMIT_S)
    usual = time.monotonic() - began
    done, began = run._shown_step(), time.monotonic()
    with fault(started) or contextlib.nullcontext():
        run.wait_for_step(done + STEPS, LIMIT_S)
    return max(time.monotonic() - began - usual, 0.0)


def faults(bench: Bench, tries: int, only: list[str]) -> Iterator[Row]:
    lacking = {"disk": bench.disk is None, "ssh": not bench.is_ssh}
    left_out = [word for word, is_lacking in lacking.items() if is_lacking]
    chosen = [each for each in FAULTS if _is_chosen(each[0], only) and not any(word in each[0] for word in left_out)]
    if not chosen:
        return
    run = bench.start(**{"system.restarts_per_process": 1000})
    started = Started(run, bench.etcd, bench.disk)
    try:
        run.wait_for_step(3, LIMIT_S)
        for what, outcome, fault in chosen:
            row = Row(what, outcome)
            for _ in range(tries):
                row.seconds.append(measured(run, started, fault))
            yield row
        interrupt(run)
        run.wait(LIMIT_S)
    finally:
        run.kill_tree()
    if findings := audit(run.run_dir).findings:
        raise SystemExit(f"the audit finds: {findings}")


@dataclass
class Refusal:
    """A command that is refused: what is wrong, what is said, and the settings that differ."""

    what: str
    says: str
    settings: dict[str, Any]


def refusals(bench: Bench) -> list[Refusal]:
    python = (
        HOSTS.replace("{name: %s, address: 127.0.0.2", "{name: box2, python: /no/python, address: 127.0.0.2") % "box3"
    )
    moved = (HOSTS % ("box2", "box3")).replace("127.0.0.3", "10.99.99.99")
    stranger = bench.settings()["system.launcher_args"].replace("]", ", '-o', 'UserKnownHostsFile=/dev/null']")
    gone = {"system.name_resolve_root": "127.0.0.1:9", "system.name_resolve_timeout_s": 5}
    return [
        Refusal(
            "ssh knows no host of this name", "ssh knows no host", {"system.hosts": HOSTS % ("no.invalid", "box3")}
        ),
        Refusal("an unknown host key", "does not know the host's key", {"system.launcher_args": stranger}),
        Refusal("no such interpreter there", "has no interpreter /no/python", {"system.hosts": python}),
        Refusal("an address of another host", "is not an address of box3", {"system.hosts": moved}),
        Refusal("etcd does not answer", "system.name_resolve", gone),
    ]


def refused(bench: Bench, tries: int, only: list[str]) -> Iterator[Row]:
    for refusal in refusals(bench):
        if not _is_chosen(refusal.what, only):
            continue
        row = Row(refusal.what, "refused before anything starts")
        for _ in range(tries):
            began = time.monotonic()
            run = bench.start(**refusal.settings, trial_name="refused")
            code = run.wait(LIMIT_S)
            row.seconds.append(time.monotonic() - began)
            if refusal.says not in run.output or not code:
                raise SystemExit(f"{refusal.what}: exit code {code}:\n{run.output}")
            row.outcome = f"refused before anything starts, exit code {code}"
        yield row


def _is_chosen(what: str, only: list[str]) -> bool:
    return not only or any(word in what for word in only)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own, where this may mount one."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_model(folder: Path) -> None:
    from transformers import Qwen2Config

    from tests.unit.conftest import save_model

    folder.mkdir()
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    save_model(folder, Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=17, eos_token_id=1))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--launcher", choices=("ssh", "slurm"), default="ssh")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only rows with one of these words")
    args = parser.parse_args()
    with contextlib.ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-hosts-")))
        make_model(folder / "model")
        (folder / "rewards.py").write_text(REWARD)
        if args.launcher == "ssh":
            config = parts.enter_context(ssh_hosts(folder / "box", ["box2", "box3"]))
            launcher = {
                "system.launcher_args": f"['-F', '{config}', '-o', 'ConnectionAttempts=1']",
                "system.hosts": HOSTS % ("box2", "box3"),
            }
        else:
            os.environ |= parts.enter_context(slurm(folder / "slurm", nodes=2))
            launcher = {"system.hosts": HOSTS % ("n1", "n2")}
        etcd = EtcdCluster(folder / "etcd", 3)
        etcd.start()
        parts.callback(etcd.kill)
        launcher["system.launcher"] = args.launcher
        bench = Bench(folder, launcher, etcd, parts.enter_context(small_disk(folder / "disk")))
        print("| what happens | outcome | it costs |\n|---|---|---|", flush=True)
        for kind in (refused, faults) if bench.is_ssh else (faults,):
            for row in kind(bench, args.tries, args.only):
                print(row.reported, flush=True)


if __name__ == "__main__":
    main()
