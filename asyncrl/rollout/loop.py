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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np

from asyncrl.algorithms.filters import FilterDecision, GroupView
from asyncrl.api import EpisodeTimeout, Prompt, Sample, Trajectory
from asyncrl.api.columns import numbers_of
from asyncrl.api.trajectory import FINISHED_AT, compared_episodes, named_columns
from asyncrl.comm.ended_rollouts import LOST_EPISODES, DropReason, failed_in, filtered
from asyncrl.comm.waits import BURST_S, HOLD_S
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.data.prompt_format import InvalidPrompt, OverlongPrompt
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import FinishedRollout, GrantedRollout
from asyncrl.rollout.episode import RetryLimits, metrics_of
from asyncrl.rollout.rollout_client import RolloutClient, RolloutPolicy
from asyncrl.rollout.settings import RolloutConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import group_failed_in, metered

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
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
    """Slots for concurrent rollouts. Each rollout that the gate grants takes one until it ends."""

    def __init__(self, gate: ManagerClient, number: int) -> None:
        self._gate, self._number, self._free = gate, number, number
        self._ids: list[str] = []
        """Ids for rollouts that are requested and not granted yet; a repeated request has the same."""
        self._room = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of running rollouts."""
        return self._number - self._free

    def figures(self) -> dict[str, float]:
        """Figures for `observed/`: running rollouts of this worker, and their limit."""
        return {"rollouts": self.running, "places": self._number}

    async def granted(self) -> list[GrantedRollout]:
        """Wait for a free slot, and request a prompt for each free slot. The rollouts that are returned take theirs.

        The list may be empty; call it again then.
        """
        if self._free == 0:
            self._room.clear()
            await self._room.wait()
            await asyncio.sleep(BURST_S)
        most = min(self._free, MAX_ASKED)
        self._ids += [uuid.uuid4().hex for _ in range(most - len(self._ids))]
        reply = await self._gate.allocate(self._ids[:most], timeout_s=HOLD_S)
        settled = {grant.rollout_id for grant in reply.granted} | set(reply.gone)
        self._ids = [rollout_id for rollout_id in self._ids if rollout_id not in settled]
        self._free -= len(reply.granted)
        return reply.granted

    def free(self) -> None:
        """Give back the slot of a rollout that ended."""
        self._free += 1
        self._room.set()


class TrajectorySender:
    """Sends trajectories, each with the counts of the episodes that were lost since the last one was acknowledged."""

    def __init__(self, push: Callable[[Trajectory], Awaitable[None]]) -> None:
        self._push = push
        self._lost: Counter[str] = Counter()

    def take_lost(self, counted: dict[str, float]) -> None:
        """Move the counts of lost episodes from a group's metrics to the next trajectory that is sent."""
        self._lost.update({name: counted.pop(name) for name in list(counted) if name.startswith(LOST_EPISODES)})

    async def send(self, trajectory: Trajectory) -> None:
        """Send `trajectory`; return when a training rank has it."""
        lost, self._lost = self._lost, Counter()  # includes counts of groups that were not pushed
        trajectory.metrics.update(lost)
        trajectory.metrics[FINISHED_AT] = time.time()
        try:
            await self._push(trajectory)
        except BaseException:
            self._lost.update(lost)
            raise


class Failures:
    """Decides if the prompts of failed rollouts are tried again, and when the loop has to end."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def clear(self) -> None:
        """Record that a rollout did not fail."""
        self._in_a_row = 0

    def end_of(self, granted: GrantedRollout, error: Exception, code: str | None, running: int) -> FinishedRollout:
        """Return the end of a rollout that failed with `error`.

        Args:
            code: name of the user's code that failed, if known.
            running: number of running rollouts, this one included.

        Raises:
            Exception: `error`, if too many rollouts have failed in a row.
        """
        rollout_id, prompt_id = granted.rollout_id, granted.prompt_id
        if isinstance(error, EpisodeTimeout):  # other TimeoutErrors are the user's own
            _log.warning("rollout of prompt %s exceeded rollout.rollout_timeout_s", prompt_id)
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.timeout)
        if isinstance(error, OverlongPrompt):  # the start reported their number; not a sign of a defect
            _log.debug("prompt %s is left out: %s", prompt_id, error)
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.overlong_prompt)
        self._in_a_row += 1
        if self._in_a_row >= max(MAX_FAILURES_IN_A_ROW, running):
            _log.error("%d rollouts in a row failed, the last on prompt %s", self._in_a_row, prompt_id)
            raise error
        reason = DropReason.invalid_prompt if isinstance(error, InvalidPrompt) else failed_in(code)
        again = reason != DropReason.invalid_prompt and granted.failures + 1 < MAX_ATTEMPTS
        fate = "to be tried again" if again else "dropped"
        _log.warning("rollout of prompt %s failed, %s", prompt_id, fate, exc_info=error)
        return FinishedRollout(rollout_id, accepted=False, reason=reason, return_prompt=again)


Filter = Callable[[GroupView], FilterDecision]
Shaping = Callable[[GroupView], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The run's rules for a group that was played: filters, shaping of rewards, and which answers are right.

    Attributes:
        filters: a group is dropped if one rejects it.
        shapings: change rewards in this order, separately in each comparison group.
        right_at: reward from which on an answer counts as right, for a curriculum; None without one.
    """

    filters: Sequence[Filter] = ()
    shapings: Sequence[Shaping] = ()
    right_at: float | None = None

    @classmethod
    def of(cls, config: RolloutConfig, registered_in: Sequence[str] = (), right_at: float | None = None) -> Self:
        """Build the rules of these settings."""
        filters, shapings = (
            [resolve(kind, choice.name, choice.params, registered_in) for choice in choices]
            for kind, choices in (("filter", config.filters), ("shaping", config.shaping))
        )
        return cls(filters, shapings, right_at)

    def judge(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return a decision to keep if the filters keep any comparison group, else the first group's rejection."""
        decisions = [self._judge_group([samples[at] for at in positions]) for positions in compared(samples)]
        return next((decision for decision in decisions if decision.keep), decisions[0])

    def _judge_group(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return the first rejection, or a decision to keep."""
        view, _ = view_of(samples)
        rejections = (decision for accept in self.filters if not (decision := accept(view)).keep)
        return next(rejections, FilterDecision(True))

    def success(self, samples: Sequence[Sample]) -> float | None:
        """Return the share of samples that count as right, by all their rewards; None without a curriculum."""
        if self.right_at is None:
            return None
        return sum(sample.total_reward >= self.right_at for sample in samples) / len(samples)

    def shape(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Apply the shapings to the rewards. The change of an episode's reward is added to each of its samples.

        Raises:
            ValueError: a shaping does not return one reward for each episode.
        """
        shaped = list(samples)
        for positions in compared(samples):
            group = self._shape_group([samples[at] for at in positions])
            for at, sample in zip(positions, group, strict=True):
                shaped[at] = sample
        return tuple(shaped)

    def _shape_group(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        for reshape in self.shapings:
            view, positions = view_of(samples)
            rewards = reshape(view)
            if len(rewards) != len(view.rewards_S):
                raise ValueError(
                    f"a shaping gave {len(rewards)} rewards for {len(view.rewards_S)} episodes; give one each"
                )
            alone = len(samples) == len(rewards)
            samples = [
                replace(sample, reward=_shaped(sample, float(rewards[at]), float(view.rewards_S[at]), alone=alone))
                for sample, at in zip(samples, positions, strict=True)
            ]
        return samples


class RolloutLoop:
    """Runs rollouts. `run` continues until it is cancelled or everything fails.

    Args:
        gate: client of the GserverManager, which admits rollouts, chooses their prompts and receives their ends.
        push: sends a trajectory to a training rank; returns once it is acknowledged.
        rules: for groups that were played.
        least_episodes: a group that lost episodes and has fewer left fails.
        make_answers: makes the record of a rollout's answers by policy; None if the run has one policy.
    """

    def __init__(
        self,
        components: UserComponents,
        gate: ManagerClient,
        client: RolloutClient,
        push: Callable[[Trajectory], Awaitable[None]],
        config: RolloutConfig,
        rules: GroupRules,
        least_episodes: int = 1,
        make_answers: Callable[[], PolicyAnswers] | None = None,
    ) -> None:
        self._components, self._gate, self._client, self._config = components, gate, client, config
        self._tries = RetryLimits(MAX_ATTEMPTS, least_episodes, config.rollout_timeout_s)
        self._rules, self._make_answers = rules, make_answers
        self._sender = TrajectorySender(push)
        self._failures = Failures()
        self.slots = RolloutSlots(gate, config.max_concurrent)

    async def run(self) -> NoReturn:
        """Keep as many rollouts running as the gate and `max_concurrent` allow."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for granted in await self.slots.granted():
                    tasks.create_task(self._roll_out(granted))

    async def _roll_out(self, granted: GrantedRollout) -> None:
        answers = None if self._make_answers is None else self._make_answers()
        policy = RolloutPolicy(self._client, granted.rollout_id, granted.route, answers)
        code: str | None = None
        try:
            if granted.rests:
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
            self._failures.clear()
        except Exception as error:
            outcome = self._failures.end_of(granted, error, code, self.slots.running)
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
        self._sender.take_lost(counted)
        return samples, metrics_of(samples) | counted | meter.metrics()

    async def _judge_and_send(
        self, granted: GrantedRollout, samples: Sequence[Sample], metrics: dict[str, float]
    ) -> FinishedRollout:
        """Send a group that the filters accept to a training rank; return the rollout's end."""
        rollout_id = granted.rollout_id
        if not samples:
            return FinishedRollout(rollout_id, accepted=False, reason=DropReason.agent_rejected)
        success = self._rules.success(samples)
        decision = self._rules.judge(samples)
        if not decision.keep:
            return self._rejection(granted, decision, success)
        shaped = self._rules.shape(samples)
        await self._sender.send(Trajectory(rollout_id, granted.prompt_id, granted.order, shaped, metrics))
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


def compared(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the positions of the samples of each comparison group, in order of first appearance."""
    by_name: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        by_name.setdefault(sample.group, []).append(position)
    return list(by_name.values())


def view_of(samples: Sequence[Sample]) -> tuple[GroupView, list[int]]:
    """Build the view of one comparison group for filters and shaping: its episodes, and for each sample the position
    of its episode.
    """
    view, position = GroupView.of_samples(
        rewards=[sample.reward for sample in samples],
        token_rewards=[sample.token_rewards for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        truncated=[sample.truncated for sample in samples],
        episodes=compared_episodes([sample.episode for sample in samples], [sample.group for sample in samples]),
        columns=named_columns([numbers_of(sample) for sample in samples]),
    )
    return view, position.tolist()


def _shaped(sample: Sample, reward: float, before: float, *, alone: bool) -> float:
    """Return the sample's new reward after its episode's total changed from `before` to `reward`.

    The result is exactly `reward` if all episodes have one sample (`alone`) and the sample has no rewards of turns.
    """
    if alone and sample.token_rewards is None:
        return reward
    return sample.reward + (reward - before)
