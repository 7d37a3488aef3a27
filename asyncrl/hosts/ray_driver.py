"""The one process of a launch that is a driver of Ray: reserves the hosts, and starts an agent on each.

    python -m asyncrl.hosts.ray_driver    below `asyncrl.hosts.ray`, which alone starts it

This keeps Ray's threads and signal handlers out of the launcher. One connection to Ray serves all hosts.

Life of a driver

1. It reads one line from standard input, the `Task`: the cluster's address and the hosts. It joins the cluster and asks
   for a placement group with a bundle per host, no two on one node (STRICT_SPREAD). A host with an address is the node
   with that address. The launcher's own host is the node of this process. Any other host is a node with enough free
   CPUs and GPUs.
2. Each further line, an `AgentRequest`, asks for an agent on a host. The host has one actor, which holds its bundle and
   starts the agent (`asyncrl.hosts.agent`). The agent dials the launcher; Ray carries nothing else. If an actor
   has died, for example with its node, the host gets a new one. Ray moves the bundle to another node that fits.
3. An agent ends with its actor, which holds its standard input. So it ends with this driver, whose actors Ray kills,
   and that ends with its own standard input, when the launcher closes it or dies.

The actor's class is sent by value, since this module is the program. So the nodes need Ray, and asyncrl only for the
interpreter of the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.comm.typed import decode_json
from asyncrl.hosts.agent import read_line
from asyncrl.hosts.agent_backend import CANNOT_START
from asyncrl.hosts.ray import AgentRequest, HostRequest, Task, ambiguous_gpus, cluster_error
from asyncrl.runtime.plan import HOST_VARIABLE

_LONGEST_REQUEST = 1 << 20
_SHOWN = 2000


class CannotStart(Exception):
    """Ray, or the cluster, cannot do what is asked; the message says what to do."""


class HostActor:
    """Starts agents on one host, and holds its bundle and their standard input."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def start(self, command: list[str], order: str) -> None:
        """Start an agent with its `order`. It leaves this process, because Ray would kill it as a child."""
        environment = dict(os.environ, **{HOST_VARIABLE: ray.util.get_node_ip_address()})
        own = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        agent = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert agent.stdin is not None, "a pipe"
        assert agent.stdout is not None, "a pipe"
        agent.stdin.write(order.encode())
        agent.stdin.flush()
        if agent.wait():
            raise RuntimeError(f"no agent can be started: {agent.stdout.read().decode(errors='replace')[-_SHOWN:]}")
        self._held.append(agent.stdin)


class Driver:
    """Holds one actor on each host of the launch. Joins the cluster when constructed.

    Raises:
        CannotStart: there is no cluster, or its nodes do not fit the hosts.
    """

    def __init__(self, task: Task) -> None:
        try:
            if why := cluster_error(task.address):
                raise OSError(why)
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
        self._bundles = {asked.name: (number, asked) for number, asked in enumerate(task.hosts)}
        self._actors: dict[str, Any] = {}

    async def start(self, request: AgentRequest) -> None:
        """Start an agent on a host, whose actor is replaced if it has died."""
        for _ in range(2):
            actor = self._actor(request.host)
            try:
                await actor.start.remote(request.command, request.order)
                return
            except RayActorError as error:
                if self._actors.get(request.host) is actor:
                    del self._actors[request.host]
                print(f"Ray lost the actor of {request.host}: {error}", flush=True)
            except RayError as error:
                print(f"{request.host}: {error}", flush=True)
                return

    def _actor(self, host: str) -> Any:
        """Return the actor of a host; create it if there is none."""
        if host not in self._actors:
            bundle, asked = self._bundles[host]
            made = ray.remote(HostActor).options(
                num_cpus=asked.cpus,
                num_gpus=asked.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            self._actors[host] = made.remote()
        return self._actors[host]

    def close(self) -> None:
        """Release the nodes."""
        remove_placement_group(self._group)


def _bundle(host: HostRequest, here: str) -> dict[str, float]:
    """Return the resources that Ray reserves for a host. Each node has a resource of its own name, so that it can be
    requested.
    """
    node = host.address if host.name else here
    asked = {"CPU": host.cpus, "GPU": host.gpus, f"node:{node}": 0.001 if node else 0.0}
    return {name: amount for name, amount in asked.items() if amount}


async def serve(driver: Driver) -> None:
    """Start the agents that standard input asks for, until it ends."""
    requests, starting = asyncio.StreamReader(_LONGEST_REQUEST), set[asyncio.Task[None]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    while line := await requests.readline():
        task = asyncio.create_task(driver.start(decode_json(line, AgentRequest)))
        starting.add(task)
        task.add_done_callback(starting.discard)


def main() -> None:
    """Serve the launcher until it closes standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the launcher's to handle
    task = decode_json(read_line(), Task)
    try:
        driver = Driver(task)
    except (CannotStart, RayError) as error:
        print(error if isinstance(error, CannotStart) else f"system.launcher=ray: {error}", flush=True)
        sys.exit(CANNOT_START)  # a retry would fail in the same way
    asyncio.run(serve(driver))
    driver.close()


if __name__ == "__main__":
    main()
