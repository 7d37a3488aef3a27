"""Processes of a config, with host, threads and GPUs. Pure, so that `--dry-run` can show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER, STAGING_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS, Purpose, Share, gpus_of_servers
from asyncrl.runtime.planning.staging_hosts import staging_hosts
from asyncrl.runtime.planning.worker_plan import Host, WorkerPlan
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.runtime.settings import HostConfig


def plan_workers(
    config: ExperimentConfig, gpus: Sequence[str] | None = None, run: Purpose = Purpose.train
) -> list[WorkerPlan]:
    """Plan every process of the launch, in the order of `PROCESS_KINDS`.

    The processes of a kind are assigned to the hosts that run it in contiguous blocks, in the order of `system.hosts`,
    so the innermost axes of a layout stay on one host. All hosts get the same number; generation servers are assigned
    in proportion to those that fit on the GPUs that training leaves on a host.

    Args:
        config: the experiment.
        gpus: GPUs of the launcher's host that may be assigned; default: the visible ones.
        run: purpose of the launch.
    """
    gpus = visible_gpus() if gpus is None else gpus

    def placed(name: str) -> list[HostConfig]:
        kind = PROCESS_KINDS[name]
        count = kind.count(config) if run in kind.runs else 0
        hosts = _hosts_of(config, kind.placed_as or name)
        if name == GENERATION_SERVER:
            hosts = _by_room(config, hosts, [share_of(host) for host in hosts])
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
            where = Host(host.name, host.address, host.python, _folder_on(host, config))
            plans.append(WorkerPlan(name, index, resources, host=where, leads=kind.leads))
    return plans


def _hosts_of(config: ExperimentConfig, kind: str) -> list[HostConfig]:
    """Return the hosts that run `kind`: those that name it, or the launcher's own if none does."""
    if kind == STAGING_SERVER:
        return staging_hosts(config)
    return [host for host in config.system.hosts if kind in host.runs] or [_HERE]


def _by_room(config: ExperimentConfig, hosts: list[HostConfig], shares: list[Share]) -> list[HostConfig]:
    """Return the hosts of generation servers, each as often as servers fit on its free GPUs; all once if none fits."""
    each = config.generation.engine.shape.gpus
    fits = [len(gpus_of_servers(config, share)) // each for share in shares]
    return [host for host, count in zip(hosts, fits, strict=True) for _ in range(count)] or hosts


def _folder_on(host: HostConfig, config: ExperimentConfig) -> str:
    """Return the run's folder on the host's own disk; empty if it is the launcher's path."""
    return str(Path(host.fileroot) / config.experiment_name / config.trial_name) if host.fileroot else ""


_HERE = HostConfig()


def with_types(config: ExperimentConfig, run: Purpose = Purpose.train) -> ExperimentConfig:
    """Return `config` with `auto` in `model.dtype` and `generation.dtype` replaced by a type.

    The type follows from the plan, so that every process of the run reads the same. The type of servers that the user
    started is not known and stays `auto`.
    """
    plans = plan_workers(config, run=run)

    def device_of(kind: str) -> str:
        return "cuda" if any(plan.resources.gpus for plan in plans if plan.kind == kind) else "cpu"

    model, generation = config.model, config.generation
    if not generation.engine.urls:
        generation = replace(generation, dtype=generation.dtype.on(device_of(GENERATION_SERVER)))
    return replace(config, model=replace(model, dtype=model.dtype.on(device_of(MODEL_WORKER))), generation=generation)
