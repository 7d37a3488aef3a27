"""`python -m asyncrl.launch join RUN`: one more GenerationServer for a run that goes on, until Ctrl-C, or its end.

Give it on any machine that has the run's folder, model and names under the same paths, a preemptible one for example.
The GserverManager finds the server by name resolution as it does the run's own, brings it the newest weights, and sends
it requests. Leaving, by Ctrl-C, SIGTERM or the machine's death, costs what the server had in hand: its clients resubmit
that, with all that was generated, to the others.

RolloutWorkers do not join: the prompts of a run are dealt out among `rollout.workers` when it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolver
from asyncrl.comm.name_resolve.errors import NameEntryExists, NameEntryNotFound
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.claim import read_holder
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.runtime.hardware import LOOPBACK, visible_gpus
from asyncrl.runtime.kinds import KINDS, Share
from asyncrl.runtime.launchers import WorkerHandle, open_backend
from asyncrl.runtime.restart_budget import RestartBudget
from asyncrl.runtime.run_dir import CONFIG_FILE, read_run_config
from asyncrl.runtime.worker import open_resolver
from asyncrl.runtime.worker_plan import Host, WorkerPlan

GONE_S = 60.0
"""A run whose manager is not to be found for so long is over; one that died is followed by another before."""
STOP_LIMIT_S = 10.0
"""So long a server may take to end after it was asked to."""
_LOOK_S = 2.0
"""Between two looks at names and servers; a stop is heard at once."""


class JoinError(Exception):
    """Nothing can join this run; the message says why."""


def main(argv: Sequence[str], program: str) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} join", description="Add GenerationServers to a run that goes on; Ctrl-C takes them away."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--kind", choices=[names.GENERATION_SERVER, names.ROLLOUT_WORKER], required=True)
    parser.add_argument("--count", type=int, default=1, help="how many, on this machine; 1 by default")
    parser.add_argument("--host", default="", help="address of this machine; by default the run's system.host")
    args = parser.parse_args(argv)
    run_dir = args.run.expanduser().resolve()
    try:
        if args.count < 1:
            raise JoinError(f"--count={args.count}: give 1 or more")
        config = joinable(run_dir, args.kind, args.host)
        with open_resolver(config, run_dir) as resolver:
            return asyncio.run(_Joined(config, run_dir, resolver).run(args.kind, args.count, args.host))
    except (JoinError, NameResolveError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG


def joinable(run_dir: Path, kind: str, host: str) -> ExperimentConfig:
    """The config of the run in `run_dir`, to which a process of `kind` on `host` can be added.

    Raises:
        JoinError: it cannot.
    """
    if not (run_dir / CONFIG_FILE).is_file() or read_holder(run_dir) is None:
        raise JoinError(f"{run_dir} is no folder of a run of yours: it is <fileroot>/<experiment_name>/<trial_name>")
    config = read_run_config(run_dir)
    if kind == names.ROLLOUT_WORKER:
        raise JoinError(
            f"--kind={kind}: prompts are dealt out among rollout.workers={config.rollout.workers} when a run starts; "
            "stop it with Ctrl-C and go on with a larger rollout.workers"
        )
    if config.generation.sglang.urls:
        raise JoinError("generation.sglang.urls: the run has the servers of that list, which somebody else starts")
    if not KINDS[kind].count(config):
        raise JoinError(f"{run_dir} is a replay of kept samples, which asks no server")
    if not config.system.encrypt and (host or config.system.host) not in LOOPBACK:
        raise JoinError(f"--host={host}: this run has system.encrypt=false, so its servers stay on 127.0.0.1")
    if not config.system.shared:
        raise JoinError("system.shared=false: nothing brings weights to this host's disk; name it in system.hosts")
    transport = config.manager.weight_transport
    if transport != "disk" and host not in {"", config.system.host, *LOOPBACK}:
        raise JoinError(f"--host={host}: manager.weight_transport={transport!r} sends to servers of the trainer's host")
    return config


class _Joined:
    """The servers that this command adds."""

    def __init__(self, config: ExperimentConfig, run_dir: Path, resolver: NameResolver) -> None:
        self._config, self._run_dir, self._resolver = config, run_dir, resolver
        holder = read_holder(run_dir)
        self._launch = "" if holder is None else holder.launch
        self._budget = RestartBudget(config.system.restarts_per_process, config.system.restart_window_s)
        self._stop = asyncio.Event()
        self._workers: list[WorkerHandle] = []
        self._serving: dict[int, str] = {}

    async def run(self, kind: str, count: int, host: str) -> int:
        """Add them and keep them up; returns the exit code.

        Raises:
            JoinError: the run does not go on.
        """
        if not await asyncio.to_thread(self._find_manager):
            raise JoinError(f"{self._run_dir}: no run goes on there, as no GserverManager is registered")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        self._backend = open_backend("local", self._run_dir)
        try:
            for offset in range(count):
                index = await asyncio.to_thread(self._take_index, kind)
                resources = KINDS[kind].resources(self._config, offset, Share(visible_gpus(), ranks=0))
                await self._start(WorkerPlan(kind, index, resources, host=Host(address=host)))
            return await self._keep_up()
        finally:
            self._backend.close()

    async def _start(self, plan: WorkerPlan) -> None:
        worker = await self._backend.start(plan)
        self._workers.append(worker)
        print(f"{plan.name} joins ({worker.description}); its log: {worker.log}", flush=True)

    async def _keep_up(self) -> int:
        """Until a stop is asked for, the run is over, or a server ends too often."""
        seen = time.monotonic()
        while not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK_S)
            for worker in [worker for worker in self._workers if worker.exit_code is not None]:
                if not await self._replace(worker):
                    return await self._leave(EXIT_FAILED)
            holder = read_holder(self._run_dir)
            if holder is None or holder.launch != self._launch:
                print("the run was started again by another launch; join that one", flush=True)
                return await self._leave(EXIT_OK)
            if await asyncio.to_thread(self._look):
                seen = time.monotonic()
            elif time.monotonic() - seen > GONE_S:
                print("the run is over", flush=True)
                return await self._leave(EXIT_OK)
        return await self._leave(EXIT_INTERRUPTED)

    async def _replace(self, worker: WorkerHandle) -> bool:
        """Start again what ended; False where it says that it cannot go on, or did so too often."""
        self._workers.remove(worker)
        again = worker.exit_code not in (EXIT_OK, EXIT_FAILED) and self._budget.spend(time.monotonic())
        print(
            f"{worker.plan.name} ended with {worker.exit_code}{'; it is started again' if again else ':'}", flush=True
        )
        if again:
            await self._start(replace(worker.plan, incarnation=worker.plan.incarnation + 1))
        else:
            print(*(f"    {line}" for line in worker.last_lines()), sep="\n", flush=True)
        return again

    async def _leave(self, code: int) -> int:
        """Ask them to stop, and wait for that; what is left is killed with the back end."""
        for worker in self._workers:
            worker.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(worker.wait() for worker in self._workers)), STOP_LIMIT_S)
        for worker in self._workers:
            print(f"{worker.plan.name} left", flush=True)
        return code

    def _look(self) -> bool:
        """Say which servers have begun to serve; whether the run goes on, as far as can be told."""
        try:
            for worker in self._workers:
                key = names.gen_server_key(worker.plan.index)
                with suppress(NameEntryNotFound):
                    url = names.GenerationServerEntry.decode(self._resolver.get(key)).url
                    if self._serving.get(worker.plan.index) != url:
                        self._serving[worker.plan.index] = url
                        print(f"{worker.plan.name} serves at {url}", flush=True)
            return self._find_manager()
        except NameResolveError as error:
            print(f"name resolution does not answer: {error}", flush=True)
            return False

    def _find_manager(self) -> bool:
        try:
            return bool(self._resolver.get(names.MANAGER_KEY))
        except NameEntryNotFound:
            return False

    def _take_index(self, kind: str) -> int:
        """The first number that neither the run nor another who joined has; ours for as long as this command lives."""
        index, who = KINDS[kind].count(self._config), f"{socket.gethostname()}, pid {os.getpid()}"
        while True:
            try:
                self._resolver.add(names.joined_key(kind, index), who, lease_s=self._config.system.heartbeat_s)
                return index
            except NameEntryExists:
                index += 1
