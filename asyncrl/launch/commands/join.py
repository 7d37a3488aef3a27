"""`python -m asyncrl.launch join RUN`: add a process to a running run, until Ctrl-C or the run's end.

Use it on any machine that has the run's folder, model and names under the same paths, for example a preemptible one; if
hosts share no folder, use it on the launcher's host.

generation_server   The GserverManager finds it by name resolution like the run's own servers, brings it the newest
                    weights, and sends it requests. When it leaves, clients resubmit its requests to the other servers,
                    with all tokens generated so far.
rollout_worker      The GserverManager gives it prompts like all RolloutWorkers. When it leaves, its prompts go
                    back to the others.

A process leaves by Ctrl-C, SIGTERM or the machine's death. Each process started here is a new incarnation of its
number. The incarnation is recorded first, so an earlier process that still runs is fenced from the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryExists, NameEntryNotFound, NameResolveError, NameResolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import CONFIG_FILE, read_run_config
from asyncrl.launch.commands import refuse
from asyncrl.runtime.backends import WorkerHandle, backend_class
from asyncrl.runtime.plan import PROCESS_KINDS, Share, WorkerPlan
from asyncrl.runtime.process.hardware import LOOPBACK, visible_gpus
from asyncrl.runtime.run_log import RestartBudget
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, HostConfig
from asyncrl.runtime.trials.claim import open_resolver, read_holder

GONE_S = 60.0
"""A run whose manager is missing for this many seconds is over; a manager that died is replaced earlier."""
STOP_LIMIT_S = 10.0
"""Longest time, in s, for a process to end after it was asked to."""
_LOOK_S = 2.0
"""Time between two checks of names and processes; a stop is noticed at once."""


class JoinError(Exception):
    """Nothing can join this run; the message says why."""


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} join",
        description="Add GenerationServers or RolloutWorkers to an active run; Ctrl-C removes them.",
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
        config, host = joinable(run_dir, args.kind, args.host)
        with open_resolver(config, run_dir) as resolver:
            return asyncio.run(_Joined(config, run_dir, resolver).run(args.kind, args.count, host))
    except (JoinError, NameResolveError) as error:
        return refuse(error)


def joinable(run_dir: Path, kind: str, host: str) -> tuple[ExperimentConfig, str]:
    """Return the config of the run in `run_dir` and the address of `host`, on which a process of `kind` can be added.

    Raises:
        JoinError: none can be added.
    """
    if not (run_dir / CONFIG_FILE).is_file() or read_holder(run_dir) is None:
        raise JoinError(
            f"{run_dir} is not the folder of one of your runs; give <fileroot>/<experiment_name>/<trial_name>"
        )
    config = read_run_config(run_dir)
    serves = kind == names.GENERATION_SERVER
    if serves and config.generation.engine.urls:
        urls = config.generation.engine.named("urls")
        raise JoinError(f"{urls}: the run uses the servers of that list, which it does not start")
    if not PROCESS_KINDS[kind].count(config):
        raise JoinError(f"{run_dir} is a replay of kept samples, which plays no prompt and asks no server")
    if not config.system.encrypt and (host or config.system.host) not in LOOPBACK:
        raise JoinError(f"--host={host}: this run has system.encrypt=false, so its processes stay on 127.0.0.1")
    if not config.system.shared_filesystem:
        (here,) = (each.address for each in config.system.hosts if not each.name)
        if host not in ("", here):
            raise JoinError(
                f"--host={host}: with system.shared_filesystem=false what processes read is brought to the hosts "
                f"that the run began with; join on the launcher's host ({here}), or name this one in system.hosts "
                "before the start"
            )
        host = here
    if not serves:
        return config, host
    transport = config.manager.weight_transport
    if transport != "disk" and host not in {"", config.system.host, *LOOPBACK}:
        raise JoinError(f"--host={host}: manager.weight_transport={transport!r} sends to servers of the trainer's host")
    return config, host


class _Joined:
    """The processes that this command adds."""

    def __init__(self, config: ExperimentConfig, run_dir: Path, resolver: NameResolver) -> None:
        self._config, self._run_dir, self._resolver = config, run_dir, resolver
        holder = read_holder(run_dir)
        self._launch = "" if holder is None else holder.launch
        self._budget = RestartBudget(config.system.restarts_per_process, config.system.restart_window_s)
        self._stop = asyncio.Event()
        self._workers: list[WorkerHandle] = []
        self._printed: dict[int, str] = {}

    async def run(self, kind: str, count: int, host: str) -> int:
        """Add processes and restart them when they die; return the exit code.

        Raises:
            JoinError: the run is not running.
        """
        if not await asyncio.to_thread(self._find_manager):
            raise JoinError(f"{self._run_dir}: no run is active there, because no GserverManager is registered")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        self._backend = backend_class("local")(self._run_dir)
        try:
            for offset in range(count):
                index = await asyncio.to_thread(self._take_index, kind)
                resources = PROCESS_KINDS[kind].resources(self._config, offset, Share(visible_gpus(), ranks=0))
                await self._start(WorkerPlan(kind, index, resources, host=HostConfig(address=host)))
            return await self._keep_up()
        finally:
            await self._backend.close()

    async def _start(self, plan: WorkerPlan, *, killed: bool = False) -> None:
        """Start the next incarnation, which replaces earlier ones that still run. `killed`: the previous one was killed
        from outside.
        """
        plan = replace(plan, incarnation=await asyncio.to_thread(self._next_incarnation, plan, killed=killed))
        worker = await self._backend.start(plan)
        self._workers.append(worker)
        print(f"{plan.name} joins ({worker.description}); its log: {worker.log}", flush=True)

    async def _keep_up(self) -> int:
        """Restart processes until a stop is requested, the run is over, or a process ends too often; return the exit
        code.
        """
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
        """Restart an ended process; return False if it reported that it cannot continue, or ended too often."""
        self._workers.remove(worker)
        again = worker.exit_code not in (EXIT_OK, EXIT_FAILED) and self._budget.spend(time.monotonic())
        print(
            f"{worker.plan.name} ended with {worker.exit_code}{'; it is started again' if again else ':'}", flush=True
        )
        if again:
            await self._start(worker.plan, killed=worker.was_killed)
        else:
            print(*(f"    {line}" for line in worker.last_lines()), sep="\n", flush=True)
        return again

    async def _leave(self, code: int) -> int:
        """Ask the processes to stop, and wait; the remaining ones are killed with the back end."""
        for worker in self._workers:
            worker.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(worker.wait() for worker in self._workers)), STOP_LIMIT_S)
        for worker in self._workers:
            print(f"{worker.plan.name} left", flush=True)
        return code

    def _look(self) -> bool:
        """Report processes that have begun to take part; return whether the run seems to be running."""
        try:
            for plan in [worker.plan for worker in self._workers]:
                with suppress(NameEntryNotFound):
                    part = self._part_of(plan)
                    if part and self._printed.get(plan.index) != part:
                        self._printed[plan.index] = part
                        print(f"{plan.name} {part}", flush=True)
            return self._find_manager()
        except NameResolveError as error:
            print(f"name resolution does not answer: {error}", flush=True)
            return False

    def _part_of(self, plan: WorkerPlan) -> str:
        """Describe what the process does; empty while it starts.

        Raises:
            NameEntryNotFound: the process is still starting.
        """
        if plan.kind == names.GENERATION_SERVER:
            server = names.GenerationServerEntry.decode(self._resolver.get(names.gen_server_key(plan.index)))
            return f"serves at {server.url}"
        status = names.WorkerStatus.decode(self._resolver.get(names.status_key(plan.kind, plan.index)))
        return f"takes part (pid {status.pid})" if status.state == "ready" else ""

    def _next_incarnation(self, plan: WorkerPlan, *, killed: bool) -> int:
        """Record that earlier processes are replaced; return the number of the next one."""
        key, incarnation = names.incarnation_key(plan.kind, plan.index), plan.incarnation + 1
        with suppress(NameEntryNotFound):
            incarnation = max(incarnation, int(self._resolver.get(key)) + (plan.incarnation == 0))
        if killed:
            self._resolver.add(names.killed_key(plan.kind, plan.index), str(incarnation), replace=True)
        self._resolver.add(key, str(incarnation), replace=True)
        return incarnation

    def _find_manager(self) -> bool:
        try:
            return bool(self._resolver.get(names.MANAGER_KEY))
        except NameEntryNotFound:
            return False

    def _take_index(self, kind: str) -> int:
        """Return the first number that no process of the run or of another `join` has; it stays reserved while this
        command runs.
        """
        index, who = PROCESS_KINDS[kind].count(self._config), f"{socket.gethostname()}, pid {os.getpid()}"
        while True:
            try:
                self._resolver.add(f"{names.JOINED}/{kind}/{index}", who, lease_s=self._config.system.lease_s)
                return index
            except NameEntryExists:
                index += 1
