"""A RolloutWorker of a simulated run: its own loop, with simulated prompts, agents and environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.api.trajectory import Trajectory
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.settings import RolloutConfig
from simulator.host.clients import SimulatedManagerClient, SimulatedRolloutClient
from simulator.host.processes import Processes
from simulator.setup import Setup
from simulator.simulated_code import SimulatedCode
from simulator.wire import Network


async def run_worker(
    index: int, setup: Setup, network: Network, on: Processes, push: Callable[[Trajectory], Awaitable[Any]]
) -> None:
    """Run the RolloutWorker `index`; `push` sends its trajectories."""
    most = setup.in_flight or setup.batch * (setup.eta + 1)
    concurrent = -(-most // setup.workers)
    code: Any = SimulatedCode(
        setup.turns,
        run_seed=setup.seed,
        group_size=setup.group,
        prompt_tokens=max(1, setup.prompt_tokens // setup.grain),
        max_new_tokens=max(1, setup.max_new_tokens // setup.grain),
        in_order=setup.in_order,
        user_s=setup.user_s,
    )
    config = RolloutConfig(
        max_concurrent=concurrent,
        rollout_timeout_s=setup.rollout_timeout_s,
        request_timeout_s=setup.request_timeout_s,
    )
    manager = SimulatedManagerClient(f"rollout_worker/{index}", network, on)
    requests = concurrent if setup.turns is None else concurrent * setup.group
    limits = {"max_concurrent": requests, "request_timeout_s": setup.request_timeout_s}
    async with SimulatedRolloutClient(manager, network, on, **limits) as client:
        await RolloutLoop(code, manager, client, push, config).run()
