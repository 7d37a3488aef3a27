"""Every kind of process of a run, and the processes of a config.

A kind (`PROCESS_KINDS`) says where its class is, how many there are and what each may use, how it ends. The launcher,
the plan and the entry point read this registry and know no kind by name. To add a kind, write its process, a `Worker`,
and enter it here by import path; only a process of that kind loads it.

The plan (`plan_workers`) has the processes of a config, with host, threads and GPUs, as plain values for a launcher
back end. It is pure, so that `--dry-run` can show it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from pathlib import Path
from typing import Final

from asyncrl.comm.names import (
    ENCODER_SERVER,
    EVALUATION_MASTER,
    EVALUATION_WORKER,
    GENERATION_SERVER,
    GSERVER_MANAGER,
    MASTER_WORKER,
    MODEL_WORKER,
    POLICY_SERVER,
    RECORDER,
    ROLLOUT_WORKER,
    STAGING_SERVER,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference.settings import colocated_servers
from asyncrl.manager.settings import PolicyConfig
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.runtime.settings import HostConfig
from asyncrl.trainer.parallel.placement import placement

GPU_ALLOCATOR = "expandable_segments:True,pinned_max_round_threshold_mb:64"
"""Settings of torch's allocator in processes that compute on a GPU. Segments that grow fit micro-batches of changing
sizes without holes, and leave more to another process on the same GPU. Pinned host memory above 64 MiB is not rounded
up to a power of two, which would take up to twice what off-loading needs. SGLang chooses its own: its kernels that
share memory between GPUs do not accept such segments.
"""


class Purpose(StrEnum):
    """Purpose of a launch."""

    train = auto()
    evaluate = auto()
    """Evaluation of a fixed model, without a trainer."""


STAGING_PROCESS: Final = "asyncrl.staging.process:StagingServer"
"""The process on each host that shares no folder. This and the four parts of other processes below are all that names
the optional package `asyncrl.staging`; they are resolved only where such hosts are (`system.shared_filesystem=false`).
"""
MANAGER_PART: Final = "asyncrl.staging.manager:bring_folders"
"""A loop of the GserverManager."""
WORKER_INPUTS: Final = "asyncrl.staging.inputs:BroughtInputs"
"""Files of a RolloutWorker from the launcher's host, if `brings_inputs`."""
BRING_INPUTS: Final = "asyncrl.staging.inputs:bring_inputs"
"""The launcher's part before processes start, if `brings_inputs`."""
INPUT_ERRORS: Final = "asyncrl.staging.inputs:not_on_other_hosts"
"""A check of the launcher's, if `brings_inputs`."""
KEPT_SAMPLES: Final = "asyncrl.offline.replay:summary_of"
"""What the command `replay` asks of a folder of kept samples."""
REPLAY: Final = "asyncrl.offline.replay:replay"
"""What a RolloutWorker does in place of rollouts, with `samples.replay`; nothing else of a run names that module."""
SHARED_DEVICES: Final = "asyncrl.colocated.master:SharedDevices"
"""The MasterWorker's turns on devices that it shares with servers. This and the parts below are all that names the
optional package `asyncrl.colocated`; they are resolved only with such servers (`generation.colocated`).
"""
COLOCATED_SERVERS: Final = "asyncrl.colocated.manager:ColocatedServers"
"""A part of the GserverManager."""
COLOCATED_SERVER: Final = "asyncrl.colocated.server:ColocatedServer"
"""A part of such a server."""
DEADLINE_PACING: Final = "asyncrl.manager.rollouts.pacing:DeadlinePacing"
"""A part of the GserverManager with `rollout.pacing=deadline`; other runs do not load it."""
BUFFER_ORDER: Final = "asyncrl.master.data.order:ConfiguredOrder"
"""A part of the MasterWorker with `buffer.order.path`; other runs do not load it."""
WIN_RATES: Final = "asyncrl.master.win_rates:WinRates"
"""A part of the MasterWorker with a prioritised pool among `policies`; other runs do not load it."""
GROUP_RULES: Final = "asyncrl.rollout.group_rules:GroupRules.of"
"""A part of the RolloutWorkers with filters, shaping or a curriculum; other runs do not load it."""
POLICY_ANSWERS: Final = "asyncrl.rollout.policy_answers:PolicyAnswers"
"""A part of the RolloutWorkers with `policies`; other runs do not load it."""
EMBEDDER: Final = "asyncrl.rollout.embedder:embedder"
"""A part of the RolloutWorkers with `rollout.encoder.servers`; other runs do not load it."""
ONLINE: Final = "asyncrl.rollout.online.agent:open_door"
"""A part of the RolloutWorkers whose agent is `OnlineAgent`; other runs load nothing of `asyncrl.rollout.online`."""
KEPT_ANSWERS: Final = "asyncrl.rollout.kept_answers:KeptAnswers"
"""A part of the RolloutWorkers with `samples.eval_every`; other runs do not load it."""
MODEL: Final = "model"
"""Name of the initial model's folder, for which a generation server waits."""
_STAGED = frozenset({GENERATION_SERVER, ROLLOUT_WORKER})
"""Kinds of processes that may run on hosts that share no folder."""
_TRAIN, _EVALUATE = frozenset({Purpose.train}), frozenset({Purpose.evaluate})


class Restart(StrEnum):
    """Processes that must restart after a process died."""

    nothing = auto()
    """The run ends. The same command continues from the newest checkpoint."""
    alone = auto()
    """The launcher starts a new process in its place (`asyncrl.runtime.launcher`)."""
    together = auto()
    """All processes of these kinds, the brain of the run, restart together: none can work without the others. A run
    that trains continues from its in-memory checkpoint (`memory_checkpoint`).
    """


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one process.

    Attributes:
        threads: CPU threads of its numeric libraries.
        gpus: GPUs that it sees, by CUDA's names for them.
        niceness: by how much its priority is lowered.
        allocator: settings of torch's GPU allocator (PYTORCH_ALLOC_CONF), unless the user has set some; empty: torch's
            defaults.
    """

    threads: int = 1
    gpus: tuple[str, ...] = ()
    niceness: int = 0
    allocator: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """The GPUs that the processes of one host share, by CUDA's names, beside `ranks` training ranks."""

    gpus: Sequence[str]
    ranks: int


def _on_cpu(config: ExperimentConfig, index: int, here: Share) -> Resources:
    return Resources(niceness=_niceness(config, here))


def _niceness(config: ExperimentConfig, here: Share) -> int:
    """Return the niceness of a process that shares the cores with training ranks; 0 where these use GPUs."""
    return 0 if here.gpus and config.trainer.device != Device.cpu else config.system.niceness


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """One kind of process.

    Attributes:
        path: import path `package.module:Class` of its `Worker`.
        count: how many there are.
        resources: what one may use: the config, its number among those of its kind on its host, what these share.
        runs: the launches that it is part of.
        leads: its normal exit is the end of the run; asked to stop, it saves first. Each launch has one leading kind.
        serves: other processes call it; it is stopped after them, so that none waits for an answer that never comes.
        essential: the run ends with it. The death of any other process is noted, and the run continues.
        restart: what the launcher restarts after its death.
        placed_as: kind that it is placed with on several hosts; empty if it is placed by its own name.
    """

    path: str
    count: Callable[[ExperimentConfig], int] = lambda config: 1
    resources: Callable[[ExperimentConfig, int, Share], Resources] = _on_cpu
    runs: frozenset[Purpose] = _TRAIN
    leads: bool = False
    serves: bool = False
    essential: bool = True
    restart: Restart = Restart.nothing
    placed_as: str = ""


def _training_rank(config: ExperimentConfig, index: int, here: Share) -> Resources:
    """Return the resources of a rank: the first GPUs of the host are assigned by worker index, one each."""
    ours = here.gpus if config.trainer.device != Device.cpu else ()
    return Resources(config.trainer.threads, _dealt(index, 1, ours), allocator=GPU_ALLOCATOR if ours else "")


def _generation_servers(config: ExperimentConfig) -> int:
    return 0 if config.samples.replay else len(config.generation.engine.urls) or config.generation.servers


def gpus_of_servers(config: ExperimentConfig, here: Share) -> Sequence[str]:
    """Return the GPUs that training ranks leave to generation servers; if they take all, the last one is shared.

    If all servers are colocated with the training ranks, these are the GPUs of the ranks.
    """
    if config.generation.device == Device.cpu:
        return ()
    taken = here.ranks if config.trainer.device != Device.cpu else 0
    if taken and len(colocated_servers(config.generation)) == config.generation.servers:
        return here.gpus[:taken]
    return here.gpus[min(taken, max(len(here.gpus) - 1, 0)) :]


def _generation_server(config: ExperimentConfig, index: int, here: Share) -> Resources:
    """Return the resources of a server: as many of the GPUs that training leaves as it has ranks.

    Too few GPUs are shared in turn. A colocated server gets GPUs of training ranks.
    """
    generation = config.generation
    ours, colocated = gpus_of_servers(config, here), colocated_servers(generation)
    if ours and index in colocated and config.trainer.device != Device.cpu:
        ours, index = here.gpus[: here.ranks] or ours, index - colocated.start
    niceness = 0 if ours else _niceness(config, here)
    engine = generation.engine
    allocator = GPU_ALLOCATOR if ours and engine.program is None else ""
    return Resources(generation.threads, _dealt(index, engine.shape.gpus, ours), niceness, allocator)


def _policy_server(config: ExperimentConfig, index: int, here: Share) -> Resources:
    """Return resources as of a generation server; policy servers that the run starts are numbered after those."""
    policies = config.policy_of_server
    if policies[index].url is not None:
        return _on_cpu(config, index, here)
    return _generation_server(config, _generation_servers(config) + _computing(policies[:index]), here)


def _computing(policies: Sequence[PolicyConfig]) -> int:
    """Return the number of these policies whose servers the run starts; the others have a URL."""
    return sum(policy.url is None for policy in policies)


def staging_hosts(config: ExperimentConfig) -> list[HostConfig]:
    """Return the hosts with a staging server, the launcher's own first; empty if all hosts see one folder."""
    hosts = [] if config.system.shared_filesystem else config.system.hosts
    return sorted((host for host in hosts if not host.name or not _STAGED.isdisjoint(host.runs)), key=lambda h: h.name)


def brings_inputs(config: ExperimentConfig) -> bool:
    """True if staging servers fetch RolloutWorkers' inputs, because some of their hosts share no folder."""
    return any(host.name and ROLLOUT_WORKER in host.runs for host in staging_hosts(config))


def _encoder_server(config: ExperimentConfig, index: int, here: Share) -> Resources:
    """Return the resources of an encoder: GPUs after those of training ranks, generation and policy servers.

    If these take all, the last GPU is shared.
    """
    gpus = config.rollout.encoder.gpus if here.gpus else 0
    if not gpus:
        return _on_cpu(config, index, here)
    taken = here.ranks if config.trainer.device != Device.cpu else 0
    if config.generation.device != Device.cpu:
        servers = _generation_servers(config) + _computing(config.policy_of_server)
        taken += servers * config.generation.engine.shape.gpus
    left = here.gpus[min(taken, len(here.gpus) - 1) :]
    return Resources(gpus=_dealt(index, gpus, left), allocator=GPU_ALLOCATOR)


def _rollout_workers(config: ExperimentConfig) -> int:
    return 1 if config.samples.replay else config.rollout.workers


def _dealt(index: int, each: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of process `index` if each process takes the next `each` of `gpus`, in turn."""
    return tuple(gpus[(index * each + offset) % len(gpus)] for offset in range(min(each, len(gpus))))


PROCESS_KINDS = {
    STAGING_SERVER: ProcessKind(
        STAGING_PROCESS,
        lambda config: len(staging_hosts(config)) if _generation_servers(config) else 0,
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.alone,
    ),
    MODEL_WORKER: ProcessKind(
        "asyncrl.trainer.process:ModelWorker",
        lambda config: 0 if config.samples.only else placement(config).workers,
        _training_rank,
        restart=Restart.together,
    ),
    GENERATION_SERVER: ProcessKind(
        "asyncrl.inference.process:GenerationServer",
        _generation_servers,
        _generation_server,
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.alone,
    ),
    POLICY_SERVER: ProcessKind(
        "asyncrl.inference.process:PolicyServer",
        lambda config: 0 if config.samples.replay else len(config.policy_of_server),
        _policy_server,
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.alone,
        placed_as=GENERATION_SERVER,
    ),
    ENCODER_SERVER: ProcessKind(
        "asyncrl.inference.encoder.process:EncoderServer",
        lambda config: 0 if config.samples.replay else config.rollout.encoder.servers,
        _encoder_server,
        serves=True,
        restart=Restart.alone,
    ),
    ROLLOUT_WORKER: ProcessKind("asyncrl.rollout.process:RolloutWorker", _rollout_workers, restart=Restart.alone),
    EVALUATION_WORKER: ProcessKind(
        "asyncrl.rollout.process:EvaluationWorker",
        _rollout_workers,
        runs=_EVALUATE,
        placed_as=ROLLOUT_WORKER,
    ),
    GSERVER_MANAGER: ProcessKind(
        "asyncrl.manager.process:GserverManager",
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.together,
    ),
    MASTER_WORKER: ProcessKind(
        "asyncrl.master.process:MasterWorker",
        lambda config: 0 if config.samples.only else 1,
        leads=True,
        restart=Restart.together,
    ),
    RECORDER: ProcessKind(
        "asyncrl.offline.masters:Recorder",
        lambda config: 1 if config.samples.only else 0,
        leads=True,
        restart=Restart.together,
        placed_as=MASTER_WORKER,
    ),
    EVALUATION_MASTER: ProcessKind(
        "asyncrl.offline.masters:EvaluationMaster",
        runs=_EVALUATE,
        leads=True,
        restart=Restart.together,
        placed_as=MASTER_WORKER,
    ),
}
"""By name, the slowest to start first."""


MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc's allocator in every worker. Buffers of up to 32 MiB, the largest value allowed, come from the
heap, and the heap keeps up to 128 MiB of free memory. With the defaults, the pages of every trajectory are returned to
the kernel and faulted in again, which costs more than sending the trajectory. Larger buffers come from the kernel:
without (`MALLOC_MMAP_MAX_=0`) a training rank has a fifth of its page faults, some 6 % of its time, but its heap falls
apart and grows with every step."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names by which torch takes the settings of its allocator, today's first."""

HOST_VARIABLE = "ASYNCRL_HOST"
"""Environment variable with a host's address, if only processes on the host know it (Ray, Kubernetes)."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One process to start.

    Attributes:
        kind, index: it is the `index`-th of its kind.
        resources: what it may use.
        incarnation: number of its dead predecessors.
        host: its host, as the settings have it. Without an address the process has the host's own value of
            `HOST_VARIABLE`, else `system.host`.
        run_dir: the run's folder on the host's own disk; empty for the launcher's path.
        leads: True if the process saves before it ends, and needs the other processes for that.
    """

    kind: str
    index: int
    resources: Resources = field(default_factory=Resources)
    incarnation: int = 0
    host: HostConfig = field(default_factory=HostConfig)
    run_dir: str = ""
    leads: bool = False

    @property
    def name(self) -> str:
        """`<kind>/<index>`."""
        return f"{self.kind}/{self.index}"

    def command(self, run_dir: Path) -> list[str]:
        """Return the command line that runs the process, for the run in `run_dir`."""
        command = [self.host.python or sys.executable, "-m", "asyncrl.runtime.main", self.kind, str(self.index)]
        command += ["--incarnation", str(self.incarnation)]
        command += ["--host", self.host.address] if self.host.address else []
        return [*command, "--run-dir", self.run_dir or str(run_dir), "--niceness", str(self.resources.niceness)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process, in addition to the launcher's own.

        A user's own choice of CUDA_DEVICE_ORDER, of torch's allocator and of glibc's stays.
        """
        threads = str(self.resources.threads)
        chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        allocator = {} if chosen else {name: value for name, value in MALLOC.items() if name not in os.environ}
        if self.resources.allocator and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            allocator[ALLOCATOR_VARIABLES[0]] = self.resources.allocator
        return allocator | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(self.resources.gpus),
            # CUDA's default is the fastest first; so its numbers are those of nvidia-smi
            "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        }


def plan_workers(
    config: ExperimentConfig, gpus: Sequence[str] | None = None, purpose: Purpose = Purpose.train
) -> list[WorkerPlan]:
    """Plan every process of the launch, in the order of `PROCESS_KINDS`.

    The processes of a kind are assigned to the hosts that run it in contiguous blocks, in the order of `system.hosts`,
    so the innermost axes of a layout stay on one host. All hosts get the same number; generation servers are assigned
    in proportion to those that fit on the GPUs that training leaves on a host.

    Args:
        config: the experiment.
        gpus: GPUs of the launcher's host that may be assigned; default: the visible ones.
        purpose: of the launch.
    """
    gpus = visible_gpus() if gpus is None else gpus

    def placed(name: str) -> list[HostConfig]:
        kind = PROCESS_KINDS[name]
        count = kind.count(config) if purpose in kind.runs else 0
        hosts = _hosts_of(config, kind.placed_as or name)
        if name == GENERATION_SERVER:
            hosts = _by_capacity(config, hosts, [share_of(host) for host in hosts])
        return [hosts[index * len(hosts) // count] for index in range(count)]

    def share_of(host: HostConfig) -> Share:
        return Share(host.gpus if host.name else host.gpus or gpus, ranks[id(host)])

    ranks = Counter(id(host) for name in PROCESS_KINDS if name == MODEL_WORKER for host in placed(name))
    plans = []
    for name, kind in PROCESS_KINDS.items():
        before: Counter[int] = Counter()
        for index, host in enumerate(placed(name)):
            resources = kind.resources(config, before[id(host)], share_of(host))
            before[id(host)] += 1
            own = Path(host.fileroot, config.experiment_name, config.trial_name) if host.fileroot else ""
            plans.append(WorkerPlan(name, index, resources, host=host, run_dir=str(own), leads=kind.leads))
    return plans


def plan_if_valid(config: ExperimentConfig) -> list[WorkerPlan]:
    """As `plan_workers`; empty without a layout or a graph, which the trainer's checks and the launcher report."""
    try:
        return plan_workers(config)
    except ValueError:
        return []


def _hosts_of(config: ExperimentConfig, kind: str) -> list[HostConfig]:
    """Return the hosts that run `kind`: those that name it, or the launcher's own if none does."""
    if kind == STAGING_SERVER:
        return staging_hosts(config)
    return [host for host in config.system.hosts if kind in host.runs] or [_HERE]


def _by_capacity(config: ExperimentConfig, hosts: list[HostConfig], shares: list[Share]) -> list[HostConfig]:
    """Return the hosts of generation servers, each as often as servers fit on its free GPUs; all once if none fits."""
    each = config.generation.engine.shape.gpus
    fits = [len(gpus_of_servers(config, share)) // each for share in shares]
    return [host for host, count in zip(hosts, fits, strict=True) for _ in range(count)] or hosts


_HERE = HostConfig()


def with_types(config: ExperimentConfig, purpose: Purpose = Purpose.train) -> ExperimentConfig:
    """Return `config` with `auto` in `model.dtype` and `generation.dtype` replaced by a type.

    The type follows from the plan, so that every process of the run reads the same. The type of servers that the user
    started is not known and stays `auto`.
    """
    plans = plan_workers(config, purpose=purpose)

    def device_of(kind: str) -> str:
        return "cuda" if any(plan.resources.gpus for plan in plans if plan.kind == kind) else "cpu"

    model, generation = config.model, config.generation
    if not generation.engine.urls:
        generation = replace(generation, dtype=generation.dtype.on(device_of(GENERATION_SERVER)))
    return replace(config, model=replace(model, dtype=model.dtype.on(device_of(MODEL_WORKER))), generation=generation)
