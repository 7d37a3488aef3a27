"""The loop of a RolloutWorker: allocate, roll out, push, report; many rollouts at the same time.

Life of a rollout

1. `allocate`: the staleness gate admits it, and the GserverManager chooses its prompt.
2. `run_group`: the agent's episodes act in their environments at the same time, with answers of the policy.
3. Filters may reject the group, which leaves the count with the filter's reason. If the filter returns the prompt, it
   is tried again with other random numbers after the rest of the epoch, `rollout.filter_tries` times in all.
4. `push`: a training rank acknowledges the trajectory.
5. `finish`, only after the acknowledgement: the manager moves the rollout from running to finished, so it is always
   counted.

An episode fails if the agent, the environment, a reward or a server raises, or if it takes too long. It is retried
alone, `MAX_ATTEMPTS` times in all, and then left out of the group (`episode.run_group`). Lost episodes are counted by
name in the metrics of the next trajectory that is pushed.

A rollout fails if too few of its episodes are left: none, or one if the advantage compares several. It also fails if
the agent plays its group at once and raises. It is dropped as `failed`, with the name of the user's code if that failed
(`failed: reward my.py:score`, `failed: agent run`). Its prompt is tried again, `MAX_ATTEMPTS` times in all. A row that
makes no prompt is dropped at once (`invalid_prompt`; `overlong_prompt`, which does not count as a failure).

If everything fails, so does the loop: it raises the last error after `MAX_FAILURES_IN_A_ROW` failures without a
success, if these outnumber the running rollouts. Fewer failures may be a few bad rows, which fail at once while good
rollouts still run.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from asyncrl.api import EpisodeTimeout, Prompt, Sample, Trajectory
from asyncrl.api.trajectory import FINISHED_AT
from asyncrl.comm.ended_rollouts import LOST_EPISODES, DropReason, failed_in, filtered
from asyncrl.comm.waits import BURST_S, HOLD_S
from asyncrl.data.prompt_format import InvalidPrompt, OverlongPrompt
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import FinishedRollout, GrantedRollout
from asyncrl.rollout.episode import RetryLimits, RolloutDropped, metrics_of
from asyncrl.rollout.rollout_client import RolloutClient, RolloutPolicy
from asyncrl.rollout.settings import RolloutConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import group_failed_in, metered

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.algorithms.filters import FilterDecision
    from asyncrl.rollout.group_rules import GroupRules
    from asyncrl.rollout.online.door import Door
    from asyncrl.rollout.policy_answers import PolicyAnswers

_log = logging.getLogger(__name__)

MAX_ASKED = 64
"""Largest number of rollouts requested in one call: enough to fill a batch in a call or two, and small enough for short
messages.
"""
MAX_ATTEMPTS = 3
"""Largest number of attempts of an episode, and of a prompt."""
MAX_FAILURES_IN_A_ROW = 16


class RolloutSlots:
    """Slots for concurrent rollouts. Each rollout that the gate grants takes one until it ends.

    Args:
        door: rollouts are requested only for clients that wait there; None: for every free slot.
    """

    def __init__(self, gate: ManagerClient, number: int, door: Door | None = None) -> None:
        self._gate, self._number, self._free, self._door = gate, number, number, door
        self._ids: list[str] = []
        """Ids for rollouts that are requested and not granted yet; a repeated request has the same."""
        self._slot_free = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of running rollouts."""
        return self._number - self._free

    def figures(self) -> dict[str, float]:
        """Figures for `observed/`: running rollouts of this worker, and their limit."""
        return {"rollouts": self.running, "slots": self._number}

    async def granted(self) -> list[GrantedRollout]:
        """Wait for a free slot, and request a prompt for each free slot. The rollouts that are returned take theirs.

        The list may be empty; call it again then.
        """
        if self._free == 0:
            self._slot_free.clear()
            await self._slot_free.wait()
            await asyncio.sleep(BURST_S)
        most, hold_s = min(self._free, MAX_ASKED), HOLD_S
        if self._door is not None:
            clients, patience_s = await self._door.clients()
            most, hold_s = min(most, clients), min(hold_s, patience_s)
        self._ids += [uuid.uuid4().hex for _ in range(most - len(self._ids))]
        reply = await self._gate.allocate(self._ids[:most], timeout_s=hold_s)
        if self._door is not None:
            self._door.admit(reply.granted)
        settled = {grant.rollout_id for grant in reply.granted} | set(reply.gone)
        self._ids = [rollout_id for rollout_id in self._ids if rollout_id not in settled]
        self._free -= len(reply.granted)
        return reply.granted

    def free(self) -> None:
        """Give back the slot of a rollout that ended."""
        self._free += 1
        self._slot_free.set()


class RolloutLoop:
    """Runs rollouts. `run` continues until it is cancelled or everything fails.

    Args:
        gate: client of the GserverManager, which admits rollouts, chooses their prompts and receives their ends.
        push: sends a trajectory to a training rank; returns once it is acknowledged.
        rules: for groups that were played; None if the run has no filter, shaping or curriculum.
        least_episodes: a group that lost episodes and has fewer left fails.
        make_answers: makes the record of a rollout's answers by policy; None if the run has one policy.
        door: where programs outside the run open sessions; None if the run's own agents play.
    """

    def __init__(
        self,
        components: UserComponents,
        gate: ManagerClient,
        client: RolloutClient,
        push: Callable[[Trajectory], Awaitable[None]],
        config: RolloutConfig,
        rules: GroupRules | None = None,
        least_episodes: int = 1,
        make_answers: Callable[[], PolicyAnswers] | None = None,
        door: Door | None = None,
    ) -> None:
        self._components, self._gate, self._client, self._config = components, gate, client, config
        self._tries = RetryLimits(MAX_ATTEMPTS, least_episodes, config.rollout_timeout_s)
        self._rules, self._make_answers, self._push, self._door = rules, make_answers, push, door
        self._lost: Counter[str] = Counter()  # episodes since the last trajectory that was acknowledged, by name
        self._failures_in_a_row = 0
        self.slots = RolloutSlots(gate, config.max_concurrent, door)

    async def run(self) -> NoReturn:
        """Keep as many rollouts running as the gate and `max_concurrent` allow."""
        async with asyncio.TaskGroup() as tasks:
            if self._door is not None:
                tasks.create_task(self._door.watch(self._gate))
            while True:
                for granted in await self.slots.granted():
                    tasks.create_task(self._roll_out(granted))

    async def _roll_out(self, granted: GrantedRollout) -> None:
        answers = None if self._make_answers is None else self._make_answers()
        policy = RolloutPolicy(self._client, granted.rollout_id, granted.route, answers)
        code: str | None = None
        try:
            if granted.skips:
                outcome = FinishedRollout(granted.rollout_id, accepted=False, reason=DropReason.curriculum)
            else:
                prompt = self._components.prompts.train(
                    PromptRef(granted.prompt_id, granted.order, granted.row, granted.attempt), granted.version
                )
                try:
                    samples, metrics = await self._episodes(prompt, policy)
                except Exception as error:
                    code = group_failed_in(error, type(self._components.agent).__name__, policy.failures)
                    raise
                outcome = await self._judge_and_send(granted, samples, metrics)
            self._failures_in_a_row = 0
        except Exception as error:
            outcome = self._failed(granted, error, code)
        finally:
            self.slots.free()
        self._gate.finish([outcome])

    async def _episodes(self, prompt: Prompt, policy: RolloutPolicy) -> tuple[Sequence[Sample], dict[str, float]]:
        """Play the group's episodes, each with its reward; return their samples and metrics."""
        with metered() as meter:
            samples, counted = await self._components.play_to_train(prompt, policy, self._tries)
        if policy.answers is not None:
            policy.answers.check(samples)
            counted |= policy.answers.metrics()
        self._lost.update({name: counted.pop(name) for name in list(counted) if name.startswith(LOST_EPISODES)})
        return samples, metrics_of(samples) | counted | meter.metrics()

    async def _judge_and_send(
        self, granted: GrantedRollout, samples: Sequence[Sample], metrics: dict[str, float]
    ) -> FinishedRollout:
        """Send a group that the filters accept to a training rank; return the rollout's end."""
        rollout_id = granted.rollout_id
        if not samples:
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.agent_rejected)
        success = None
        if self._rules is not None:
            success, decision = self._rules.success(samples), self._rules.judge(samples)
            if not decision.keep:
                return self._rejection(granted, decision, success)
            samples = self._rules.shape(samples)
        await self._send(Trajectory(rollout_id, granted.prompt_id, granted.order, tuple(samples), metrics))
        return FinishedRollout(rollout_id, accepted=True, success=success)

    def _rejection(self, granted: GrantedRollout, decision: FilterDecision, success: float | None) -> FinishedRollout:
        """Return the end of a rollout whose group a filter rejected. Its prompt is tried again if the filter returns it
        and it has tries left.
        """
        again = decision.return_prompt and granted.attempt + 1 < self._config.filter_tries
        reason = filtered(decision.reason, exhausted=decision.return_prompt and not again)
        return FinishedRollout(
            granted.rollout_id,
            accepted=False,
            reason=reason,
            return_prompt=again,
            as_next_attempt=again,
            success=success,
        )

    async def _send(self, trajectory: Trajectory) -> None:
        """Send `trajectory` with the counts of lost episodes; return when a training rank has it."""
        lost, self._lost = self._lost, Counter()  # includes counts of groups that were not pushed
        trajectory.metrics.update(lost)
        trajectory.metrics[FINISHED_AT] = time.time()
        try:
            await self._push(trajectory)
        except BaseException:
            self._lost.update(lost)
            raise

    def _failed(self, granted: GrantedRollout, error: Exception, code: str | None) -> FinishedRollout:
        """Return the end of a rollout that failed with `error`, in the user's code of the name `code`, if known.

        Raises:
            Exception: `error`, if too many rollouts have failed in a row.
        """
        rollout_id, prompt_id = granted.rollout_id, granted.prompt_id
        if isinstance(error, RolloutDropped):
            return FinishedRollout(rollout_id, accepted=False, reason=error.reason)
        if isinstance(error, EpisodeTimeout):  # other TimeoutErrors are the user's own
            _log.warning("rollout of prompt %s exceeded rollout.rollout_timeout_s", prompt_id)
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.timeout)
        if isinstance(error, OverlongPrompt):  # the start reported their number; not a sign of a defect
            _log.debug("prompt %s is left out: %s", prompt_id, error)
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.overlong_prompt)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= max(MAX_FAILURES_IN_A_ROW, self.slots.running):
            _log.error("%d rollouts in a row failed, the last on prompt %s", self._failures_in_a_row, prompt_id)
            raise error
        reason = DropReason.invalid_prompt if isinstance(error, InvalidPrompt) else failed_in(code)
        again = reason != DropReason.invalid_prompt and granted.failures + 1 < MAX_ATTEMPTS
        fate = "to be tried again" if again else "dropped"
        _log.warning("rollout of prompt %s failed, %s", prompt_id, fate, exc_info=error)
        return FinishedRollout(rollout_id, accepted=False, reason=reason, return_prompt=again)
