"""The master's calls to the gate about the run's rollouts: what was trained, and what is dropped.

The GserverManager decides what counts, and records it in the ledger. The master brings it the checkpoint from which the
run continues (`begin`), reports each complete step, and receives the gate's part of the next checkpoint. Both die and
begin together, so a report needs no acknowledgement of its own: what a checkpoint does not have did not happen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from asyncrl.api.trajectory import GENERATED, OPPONENTS, policy_of
from asyncrl.comm.ended_rollouts.ledger_lines import PolicyTokens, RolloutCounts
from asyncrl.comm.names import ACTOR
from asyncrl.comm.waits.limits import ANSWER_S
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import ConsumedReply, GateCheckpoint, RunBegin, TrainedRollout
from asyncrl.master.data.collector import Collector, received
from asyncrl.master.data.sample_buffer import Drop, SampleBuffer, TrainBatch
from asyncrl.master.recovery.run_files import BooksError
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts
from asyncrl.runtime.process.waiting import StopRequested, cancel, or_stop
from asyncrl.trainer.messages import RolloutRecord

_T = TypeVar("_T")


class Reports:
    """Calls the manager; a `version` argument is always the model's current version.

    Args:
        collector: polls the ranks, and has them free dropped rollouts.
        buffer: has the received rollouts, and the dropped ones.
        stop: shortens the waits.
        limit_s: time limit of each call.

    Attributes:
        counts: the gate's counters in its newest reply.
        status: the gate's state in its newest reply.
        checkpoint: the gate's part of the run's state at its newest version.
    """

    def __init__(
        self,
        manager: ManagerClient,
        collector: Collector,
        buffer: SampleBuffer,
        stop: asyncio.Event,
        *,
        limit_s: float,
    ) -> None:
        self.counts, self.status = RolloutCounts(), GateStatus()
        self.checkpoint = GateCheckpoint(used=UsedPrompts().to_json())
        self._manager, self._collector, self._buffer, self._stop = manager, collector, buffer, stop
        self._limit_s, self._begun = limit_s, False
        self._drops: list[Drop] = []

    def restore(self, trained: int, checkpoint: GateCheckpoint) -> None:
        """Continue from `checkpoint`, with the counters that the gate begins with: B trained per version, even if B was
        different at the time.
        """
        self.checkpoint = checkpoint
        self.counts = checkpoint.counts(trained)

    async def look(self) -> None:
        """Ask for the manager's status without a report."""
        self.status = await or_stop(self._manager.status(), self._stop, self._limit_s)

    async def begin(self, version: int) -> None:
        """Bring the manager the checkpoint, unless that is done; then it opens its gate.

        The ranks are polled first, as the manager may have no other report of the rollouts that they hold.

        Raises:
            HttpRefused: the manager refuses, so that it would admit no rollout.
        """
        if self._begun:
            return
        await self._collector.refresh()
        self._drops += self._buffer.pop_drops()
        records = [*self._buffer.live(), *(drop.record for drop in self._drops)]
        await self._manager.begin_run(RunBegin(version, self.checkpoint, list(map(received, records))))
        self._begun = True
        await self._collector.confirm()

    async def trained(self, batch: TrainBatch) -> None:
        """Report the complete step of `batch`, and what the buffer dropped; have the ranks free the latter.

        Raises:
            TimeoutError: the manager does not answer.
        """
        version, trained = batch.version + 1, [trained_rollout(record) for record in batch.records]
        reply = await self._send(version, trained)
        assert reply.checkpoint is not None, "the gate answers a step with its checkpoint"
        self.checkpoint = reply.checkpoint

    async def dropped(self, version: int) -> None:
        """Report what the buffer drops, which takes up room at the gate, and have the ranks free it."""
        while self._drops or self._buffer.has_drops:
            await self._send(version, [])

    async def close_gate(self) -> None:
        """Have the gate admit no more rollouts."""
        await self._manager.close_gate()

    async def end(self, version: int) -> None:
        """Close the gate and account for every rollout.

        Raises:
            BooksError: the manager does not answer.
        """
        try:
            await self._answered(self._end(version))
        except TimeoutError as error:
            raise BooksError("the GserverManager did not account for the rollouts at the end of the run") from error

    async def _end(self, version: int) -> None:
        await self.begin(version)  # a stop request may have come before the beginning had done it
        await self.close_gate()
        await self.dropped(version)
        self.counts = await self._manager.end_run(version)

    async def _send(self, version: int, trained: list[TrainedRollout]) -> ConsumedReply:
        """Send one report and process the reply. Drops that the manager may not have stay for the next report."""
        self._drops += self._buffer.pop_drops()
        drops = list(self._drops)
        messages = [drop.message for drop in drops]
        reply = await self._answered(self._manager.consumed(version, trained, messages))
        self.counts = reply.counts
        self.status = GateStatus(reply.idle_s, frozenset(reply.versions_in_use), reply.counts.dropped)
        del self._drops[: len(drops)]
        if drops:
            await self._collector.discard([drop.record for drop in drops], self._limit_s)
        return reply

    async def _answered(self, call: Awaitable[_T]) -> _T:
        """Await `call`, after a stop request for `ANSWER_S` at most.

        Raises:
            TimeoutError: it does not end in time.
        """
        task = asyncio.ensure_future(call)
        try:
            return await or_stop(asyncio.shield(task), self._stop, self._limit_s)
        except StopRequested:
            async with asyncio.timeout(min(ANSWER_S, self._limit_s)):
                return await asyncio.shield(task)
        finally:
            await cancel(task)


def trained_rollout(record: RolloutRecord) -> TrainedRollout:
    """Return what the ledger says about a trained rollout."""
    samples, rewards = len(record.rewards), record.episode_rewards
    reward = sum(rewards) / len(rewards)
    head = (record.rollout_id, record.prompt_id, record.order, record.version_tokens)
    return TrainedRollout(*head, len(rewards), samples, reward, _opponents(record.metrics), _policies(record))


def _opponents(metrics: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the oldest and newest version of each policy that answered in a rollout with these metrics."""
    versions: dict[str, dict[str, int]] = {}
    for name, number in metrics.items():
        if name.startswith(OPPONENTS):
            policy, _, which = name.removeprefix(OPPONENTS).partition("/")
            versions.setdefault(policy, {})[which] = int(number)
    return {policy: (each["oldest_version"], each["newest_version"]) for policy, each in versions.items()}


def _policies(record: RolloutRecord) -> dict[str, PolicyTokens]:
    """Return the share of each trained policy in a rollout, from what its worker and the trainer counted."""
    generated = {name.removeprefix(GENERATED): n for name, n in record.metrics.items() if name.startswith(GENERATED)}
    of_sample = [policy_of(group, generated) or ACTOR for group in record.groups or [""] * len(record.generated)]
    trained, samples = Counter[str](), Counter(of_sample)
    for policy, tokens in zip(of_sample, record.generated, strict=True):
        trained[policy] += tokens
    return {name: PolicyTokens(int(each), trained[name], samples[name]) for name, each in generated.items()}
