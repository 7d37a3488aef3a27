"""The one process of a launch that is a driver of Ray: reserves the hosts, and carries bytes to supervisors on them.

    python -m asyncrl.runtime.hosts.ray_driver FD        below `asyncrl.runtime.launchers.ray`, which alone starts it

This keeps Ray's threads and signal handlers out of the launcher. One connection to Ray serves all processes.

Life of a driver

1. It reads one line from standard input, the `Task`: the cluster's address and the hosts. It joins the cluster and asks
   for a placement group with a bundle per host, no two on one node (STRICT_SPREAD). A host with an address is the node
   with that address. The launcher's own host is the node of this process. Any other host is a node with enough free
   CPUs and GPUs.
2. Each process that the launcher starts has a carrier (`asyncrl.runtime.hosts.ray_carrier`), which connects to the
   listening socket, a descriptor that the command line names, and hands over its standard input and output with a
   `ProcessRequest`.
3. The request's host has one actor, which holds the host's bundle and starts a supervisor
   (`asyncrl.runtime.supervisor`) for each process. The carrier's standard input goes to the supervisor. The output of
   the supervisor's tree comes back, then its exit code. If an actor died, for example with its node, its host gets a
   new actor when a process is next started there. Ray moves the bundle to another node that fits.
4. The driver's standard input ends when the launcher closes it or dies. The carriers' inputs end then too, and the
   supervisors end their trees. After that the driver ends. If the driver dies, Ray kills its actors, which ends the
   supervisors' inputs too.

The actor's class is sent by value, since this module is the program. So the nodes need Ray, and asyncrl only for the
interpreter `python`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.runtime.exit_codes import EXIT_LOST
from asyncrl.runtime.hosts.ray_requests import HostRequest, ProcessRequest, Task, ambiguous_gpus
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE
from asyncrl.runtime.supervisor import LONGEST_ORDER, TOLD_FAILED, read_order

_CHUNK = 64 << 10
_HANDOVER_LIMIT_S = 20.0
_CONNECT_LIMIT_S = 10.0
_ENDS_LIMIT_S = 20.0
"""Longest time, in s, for the processes to end after the launcher; the supervisors' own limits are shorter."""


class CannotStart(Exception):
    """Ray, or the cluster, cannot do what is asked; the message says what to do."""


class HostActor:
    """Runs supervisors on one host, and holds its bundle. Methods take the number that the driver gave the process."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    async def start(self, number: int, request: tuple[str, str, str, list[int]], order: bytes) -> None:
        """Start a supervisor with its `order`. It is not a child of this process, because Ray would kill it as one."""
        _, python, supervisor, gpus = request
        environment = dict(os.environ, **{HOST_VARIABLE: ray.util.get_node_ip_address()})
        if gpus:
            own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own[gpu] for gpu in gpus)
        theirs, told = os.pipe()
        printed, output = os.pipe()
        status, ended = os.pipe()
        run = functools.partial(subprocess.run, stdin=theirs, stdout=output, stderr=output, pass_fds=[ended])
        try:
            command = [python, "-I", "-S", supervisor, "--detached", str(ended)]
            await asyncio.to_thread(run, command, env=environment, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            os.write(output, f"a supervisor cannot be started: {error}\n".encode())
            os.write(ended, b"127")
        finally:
            for descriptor in (theirs, output, ended):
                os.close(descriptor)
        loop = asyncio.get_running_loop()
        told_to, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(told, "wb", 0))
        self._kept[number] = _Kept(told_to, await _reader_of(printed), await _reader_of(status))
        told_to.write(order)

    async def tell(self, number: int, what: bytes) -> None:
        """Write to the standard input of a supervisor, unless the supervisor has ended; an empty `what` closes the
        input.
        """
        if number not in self._kept:
            return
        if what:
            self._kept[number].told.write(what)
        else:
            self._kept[number].told.close()

    async def output(self, number: int) -> bytes:
        """Wait for output and return what was printed since the last call; empty once everything has ended."""
        return await self._kept[number].printed.read(_CHUNK)

    async def exit_code(self, number: int) -> int:
        """Return the exit code of a supervisor that has ended, and forget the supervisor."""
        kept = self._kept.pop(number)
        kept.told.close()
        code = await kept.status.read()
        return int(code) if code else 128 + signal.SIGKILL


class _Kept(NamedTuple):
    """A supervisor's standard input, the output of its tree, and the descriptor that receives its exit code."""

    told: asyncio.WriteTransport
    printed: asyncio.StreamReader
    status: asyncio.StreamReader


async def _reader_of(descriptor: int, limit: int = _CHUNK) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit)
    file = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


class _Host:
    """The driver's side of a host: its bundle, and its actor, which is created on first use and after it died."""

    def __init__(self, bundle: int, group: PlacementGroup, asked: HostRequest) -> None:
        self._asked = asked
        self._where = PlacementGroupSchedulingStrategy(group, bundle)
        self._actor: Any = None

    def actor(self) -> Any:
        if self._actor is None:
            made = ray.remote(HostActor).options(
                num_cpus=self._asked.cpus, num_gpus=self._asked.gpus, scheduling_strategy=self._where
            )
            self._actor = made.remote()
        return self._actor

    def lost(self, actor: Any) -> None:
        """Forget `actor`, which is dead, so that the next use creates a new one."""
        if self._actor is actor:
            self._actor = None


class Driver:
    """Holds one actor on each host of the launch. Joins the cluster when constructed.

    Raises:
        CannotStart: there is no cluster, or its nodes do not fit the hosts.
    """

    def __init__(self, task: Task) -> None:
        try:
            _check_reachable(task.address)
            ray.init(address=task.address, log_to_driver=False, logging_level="WARNING")
        except (OSError, RuntimeError, ValueError) as error:
            raise CannotStart(
                f"system.launcher=ray: no cluster at address {task.address!r}: {error}; give system.launcher_args="
                "['--address=HOST:PORT'], start one (`ray start --head`), or take ['--address=local'] for one on this "
                "host alone"
            ) from error
        here = ray.util.get_node_ip_address()
        mine = next(
            node["Resources"] for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()
        )
        if (fault := ambiguous_gpus(task.hosts, int(mine.get("GPU", 0)))) is not None:
            raise CannotStart(fault)
        bundles = [_bundle(host, here) for host in task.hosts]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(task.limit_s):
            nodes = [f"{node['NodeManagerAddress']} {node['Resources']}" for node in ray.nodes() if node["Alive"]]
            raise CannotStart(
                f"system.hosts: Ray did not find {len(bundles)} nodes with {bundles} within {task.limit_s:g} s, each "
                f"on a node of its own (STRICT_SPREAD); its nodes are {'; '.join(nodes)}"
            )
        self._hosts = {asked.name: _Host(number, self._group, asked) for number, asked in enumerate(task.hosts)}
        self._count = 0

    async def carry(self, request: ProcessRequest, from_launcher: int, output: int) -> int:
        """Run one process to its end. Return its exit code."""
        host = self._hosts[request.host]
        actor = host.actor()
        self._count += 1
        number = self._count
        commands = await _reader_of(from_launcher, LONGEST_ORDER)
        try:
            await actor.start.remote(number, tuple(request), await commands.readline())
            telling = asyncio.create_task(_tell(actor, number, commands))
            try:
                while printed := await actor.output.remote(number):
                    os.write(output, printed)
            finally:
                telling.cancel()
            return int(await actor.exit_code.remote(number))
        except RayActorError as error:
            host.lost(actor)
            os.write(output, f"Ray lost the actor of {request.host}: {error}\n".encode())
            return EXIT_LOST

    def close(self) -> None:
        """Release the nodes."""
        remove_placement_group(self._group)


async def _tell(actor: Any, number: int, commands: asyncio.StreamReader) -> None:
    """Pass the launcher's bytes on to a supervisor, the end of the input included."""
    with contextlib.suppress(RayActorError):  # `carry` gets the same error
        while what := await commands.read(_CHUNK):
            await actor.tell.remote(number, what)
        await actor.tell.remote(number, b"")


def _check_reachable(address: str) -> None:
    """Raise an OSError if nothing listens at HOST:PORT; Ray itself takes minutes to report that."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()


def _bundle(host: HostRequest, here: str) -> dict[str, float]:
    """Return the resources that Ray reserves for a host. Each node has a resource of its own name, so that it can be
    requested.
    """
    node = host.address if host.name else here
    asked = {"CPU": host.cpus, "GPU": host.gpus, f"node:{node}": 0.001 if node else 0.0}
    return {name: amount for name, amount in asked.items() if amount}


async def serve(driver: Driver | CannotStart, listening: socket.socket) -> None:
    """Serve carriers until standard input ends, and then until their processes have."""
    loop = asyncio.get_running_loop()
    served: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        listening.setblocking(False)
        while True:
            connection, _ = await loop.sock_accept(listening)
            task = asyncio.create_task(_serve_one(driver, connection))
            served.add(task)
            task.add_done_callback(served.discard)

    accepting = asyncio.create_task(accept())
    launcher = await _reader_of(0)
    await launcher.read()
    accepting.cancel()
    if served:
        await asyncio.wait(served, timeout=_ENDS_LIMIT_S)


async def _serve_one(driver: Driver | CannotStart, connection: socket.socket) -> None:
    with connection:
        connection.settimeout(_HANDOVER_LIMIT_S)
        asked, (from_launcher, output), _, _ = await asyncio.to_thread(socket.recv_fds, connection, _CHUNK, 2)
        try:
            if isinstance(driver, CannotStart):
                os.write(output, f"{driver}\n".encode())
                os.close(from_launcher)
                code = TOLD_FAILED  # a retry would fail in the same way
            else:
                code = await driver.carry(ProcessRequest(*json.loads(asked)), from_launcher, output)
        finally:
            os.close(output)
        with contextlib.suppress(OSError):  # the carrier has gone
            connection.sendall(b"%d" % code)


def main() -> None:
    """Serve carriers until the launcher closes standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the launcher's to handle
    listening = socket.socket(fileno=int(sys.argv[1]))
    address, hosts, limit_s = json.loads(read_order())
    try:
        driver: Driver | CannotStart = Driver(Task(address, [HostRequest(*host) for host in hosts], limit_s))
    except (CannotStart, RayError) as error:
        driver = error if isinstance(error, CannotStart) else CannotStart(f"system.launcher=ray: {error}")
        print(driver, flush=True)
    try:
        asyncio.run(serve(driver, listening))
    finally:
        shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)  # a killed launcher cannot
    if isinstance(driver, Driver):
        driver.close()


if __name__ == "__main__":
    main()
