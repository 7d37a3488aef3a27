"""RolloutWorker: the process around `RolloutLoop` and `Evaluator`, with its sockets, addresses and stop handling."""

from __future__ import annotations

import asyncio
import os
import pkgutil
from collections.abc import Coroutine
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.comm import names
from asyncrl.comm.push_pull import TrajectoryPusher, group
from asyncrl.comm.request_reply import Done, RequestServer
from asyncrl.comm.waits import CLOSE_S, LOOK_S
from asyncrl.config.run_dir import ANSWERS_DIR, DATA_RECORD_FILE
from asyncrl.manager.client import ManagerClient
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.rollout.evaluation import Evaluator
from asyncrl.rollout.generation_servers import capabilities_of
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.messages import Evaluate, EvaluationResult, StillThere
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code.prompts import check_same_data
from asyncrl.rollout.user_code_pool.call_records import failed_user_code
from asyncrl.runtime.plan import (
    EMBEDDER,
    GROUP_RULES,
    KEPT_ANSWERS,
    ONLINE,
    POLICY_ANSWERS,
    REPLAY,
    WORKER_INPUTS,
    brings_inputs,
)
from asyncrl.runtime.process.waiting import StopRequested, cancel
from asyncrl.runtime.process.worker import AsyncWorker, CannotContinue

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.rollout.kept_answers import KeptAnswers


class RolloutWorker(AsyncWorker):
    """Runs agents, environments and rewards on the prompts that the GserverManager hands out."""

    trains: ClassVar[bool] = True
    """True if the worker has training prompts; False if it only evaluates."""

    async def main(self) -> None:
        """Wait for the other processes, then run rollouts until a stop is requested."""
        try:
            if self.config.samples.replay:
                await pkgutil.resolve_name(REPLAY)(self)
            else:
                await self._main_until_stopped()
        except StopRequested:
            self.log.info("stopped before the others were there")

    async def _main_until_stopped(self) -> None:
        config, run_dir = self.config, self.run_dir
        brought = pkgutil.resolve_name(WORKER_INPUTS)(self, self.trains) if brings_inputs(config) else None
        if brought is not None:
            run_dir = await brought.arrive()
        observer.stage("loads data, agent and reward")
        self._components = UserComponents(config, training=self.trains)
        if self.trains:
            check_same_data(run_dir / DATA_RECORD_FILE, self._components.prompts.train_set, config.dataset.path)
        if brought is not None:
            await brought.check(self._components.prompts)
        self._loop_of_main = asyncio.get_running_loop()
        for line in self._components.chat_notes():
            self.log.info("chat template: %s", line)
        rollout = config.rollout
        can = capabilities_of(config, self._components.vocab_size, self._components.tokenizer.decode_all)
        manager = await self.find_manager()
        embedding = pkgutil.resolve_name(EMBEDDER)(self) if rollout.encoder.servers else nullcontext()
        try:
            async with (
                self._components.entered(),
                embedding as embed,
                RolloutClient(
                    manager,
                    can,
                    security=self.http_security,
                    max_concurrent=rollout.max_concurrent + self._evaluations_at_a_time,
                    request_timeout_s=rollout.request_timeout_s,
                    new_tokens_per_chunk=rollout.new_tokens_per_chunk,
                ) as client,
            ):
                self._components.rewards.embedder = embed
                self._evaluator = Evaluator(
                    self._components,
                    client,
                    index=self.index,
                    workers=rollout.workers,
                    max_concurrent=self._evaluations_at_a_time,
                    keep=self._kept_answers(),
                )
                server = RequestServer(
                    config.system.host,
                    self.security,
                    immediate={Evaluate: self._evaluate, StillThere: self._is_there},
                )
                try:
                    self._register(server.endpoint)
                    await self._run(manager, client)
                finally:
                    self._evaluator.cancel()
                    server.close()
        finally:
            await manager.close()

    async def find_manager(self) -> ManagerClient:
        """Return a client of the GserverManager once that is registered."""
        url, incarnation = await self.registered(names.MANAGER_KEY, names.GSERVER_MANAGER), self.spec.incarnation
        find = partial(self.resolver.get, names.MANAGER_KEY)
        return ManagerClient(
            url,
            self.name,
            self.http_security,
            incarnation=incarnation,
            find=find,
            launch=self.launch,
            host=self.config.system.host,
        )

    def _kept_answers(self) -> KeptAnswers | None:
        """Open the writer of evaluations' answers; None if none are to be kept."""
        samples, workers = self.config.samples, self.config.rollout.workers
        if not samples.eval_every:
            return None
        sets = len(self._components.prompts.eval_sets) or 1
        max_bytes, decode = int(samples.max_gb * 1e9 / workers / sets), self._components.tokenizer.decode
        folder = self.run_dir / ANSWERS_DIR
        kept: KeptAnswers = pkgutil.resolve_name(KEPT_ANSWERS)(
            folder, samples.eval_every, max_bytes, decode, index=self.index, workers=workers
        )
        return kept

    async def _run(self, manager: ManagerClient, client: RolloutClient) -> None:
        """Play rollouts until a stop is requested."""
        components, config = self._components, self.config
        curriculum = config.dataset.curriculum
        right_at = curriculum.right_at if curriculum.is_on else None
        make_answers = None
        if config.policies:
            make_answers = partial(pkgutil.resolve_name(POLICY_ANSWERS), config.trained_policies)
        pusher = TrajectoryPusher((), self.security, identity=self.name)
        try:
            rules = None
            if config.rollout.filters or config.rollout.shaping or right_at is not None:
                rules = pkgutil.resolve_name(GROUP_RULES)(config.rollout, config.algorithm.plugins, right_at)
            least = config.algorithm.least_episodes
            door = await pkgutil.resolve_name(ONLINE)(self, components) if config.is_online else None
            parts = components, manager, client, pusher.push, config.rollout
            loop = RolloutLoop(*parts, rules, least, make_answers, door)
            self.ready()
            observer.stage("plays", Activity.serves)
            observer.gauges(loop.slots.figures)
            observer.gauges(client.figures)
            await self.until_stopped(loop.run(), pusher)
        finally:
            unacknowledged = await pusher.close(CLOSE_S)
            self.log.info("stopped; %d trajectories were never acknowledged", len(unacknowledged))

    async def until_stopped(self, loop: Coroutine[Any, Any, Any], pusher: TrajectoryPusher) -> None:
        """Run the loop until a stop is requested; its failure fails the worker.

        Raises:
            CannotContinue: all rollouts fail in users' code, whose tracebacks the log has.
        """
        working = [asyncio.create_task(work) for work in (loop, self._follow_pullers(pusher))]
        stopping = asyncio.create_task(self.stop.wait())
        try:
            done, _ = await asyncio.wait({*working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        except Exception as error:
            if (failed := failed_user_code(error)) is None:
                raise
            raise CannotContinue(f"all rollouts fail, the last one as {failed}") from error
        finally:
            await cancel(*working, stopping)

    @property
    def _has_joined(self) -> bool:
        """True if the worker was added to a running run."""
        return self.index >= self.config.rollout.workers

    @property
    def _evaluations_at_a_time(self) -> int:
        """Return the number of concurrent episodes in an evaluation: as many answers as training requests."""
        return self.config.rollout.max_concurrent * self.config.group_size

    def _register(self, endpoint: str) -> None:
        address, lease_s = names.WorkerAddress(endpoint, os.getpid()).encode(), self.config.system.lease_s
        self.resolver.add(names.worker_key(self.spec.kind, self.index), address, lease_s=lease_s, replace=True)

    async def _follow_pullers(self, pusher: TrajectoryPusher) -> None:
        """Keep sending to the training ranks that this worker is grouped with, while ranks and workers come and go.

        Each worker computes the groups itself, from the registered workers (`group`).
        """
        known: set[tuple[str, str]] = set()
        me, lease_s = f"{names.PUSHERS}/{self.index}", self.config.system.lease_s
        await asyncio.to_thread(self.resolver.add, me, self.name, lease_s=lease_s, replace=True)
        ranks = await asyncio.to_thread(self.resolver.follow, names.PULLERS)
        workers = await asyncio.to_thread(self.resolver.follow, names.PUSHERS)
        while True:
            pullers, pushers = ranks.entries(), workers.entries()
            mine = group({*pushers, me}, pullers)[me]
            if self._has_joined and not known.issuperset(pullers.items()):
                await asyncio.to_thread(self.exit_if_fenced)  # the ranks may belong to a restarted run
            if known and not pullers:
                self.log.warning("no training rank is registered: complete trajectories wait here until one is")
            known = set(pullers.items())
            pusher.set_addresses(pullers[key] for key in mine)
            await asyncio.sleep(LOOK_S)

    async def _is_there(self, request: StillThere) -> Done:
        """Answer once the main loop has run; see `_evaluate`."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop_of_main))
        return Done()

    async def _evaluate(self, request: Evaluate) -> EvaluationResult:
        """Answer a request on the server's I/O thread; the evaluation itself runs in the main loop."""
        evaluating = self._evaluator.evaluate(request.name, request.version)
        evaluation = asyncio.run_coroutine_threadsafe(evaluating, self._loop_of_main)
        return await asyncio.wrap_future(evaluation)


class EvaluationWorker(RolloutWorker):
    """A RolloutWorker of a launch that only evaluates: it answers its share of the evaluation sets.

    It has no training prompts and sends no trajectories.
    """

    trains = False

    async def _run(self, manager: ManagerClient, client: RolloutClient) -> None:
        self.ready()
        await self.stop.wait()
