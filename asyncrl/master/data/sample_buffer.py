"""The received rollouts: they come from the ranks (`Collector`), wait until a step takes them or they expire
(`SampleBuffer`), and the gate hears what became of them (`Reports`). All of it is metadata; tensors wait at the ranks.

Life of a record

    arrives ──▶ live ──take──▶ taken ──mark_trained──▶ trained
      │           └──expired at take──▶ dropped: stale         (its prompt waits again)
      ├──▶ does not count: its worker was given up, and its prompt is played again
      ├──▶ dropped: stale                                      (expired before it arrived)
      └──▶ a second copy of a known rollout id: freed at the worker that holds it, not counted

Arrival. One task per data-parallel head keeps a long poll open, which the worker's I/O thread answers even while its
main thread computes. Each poll acknowledges the previous reply by its cursor, so the content of a lost reply is sent
again; the buffer recognises repeats. What arrives is reported to the manager, whose gate says which of it counts and
has one live rollout of a prompt at most. Only what counts comes to the buffer.

Rollouts come in bursts, and a poll for each would cost the master more than everything else it does. So polls are
paced: slowly while no step waits for data, and otherwise too fast for a step to notice. A waiting step says how many
rollouts are missing, and a poll is answered when a head has its share of them, or `GATHER_S` after its first one.

A silent worker is asked again as long as its connection is open: it may be suspended for a while. The launcher decides
whether it died, and the train loop how long a run may make no step.

The rule at consumption. The step that takes the policy from version v to v + 1 may train tokens of versions v - η to v.
Admission alone cannot guarantee this (a long rollout is overtaken by others), so `take(v)` drops what has expired.
Under `drop` and `wait` a record expires by its oldest token; under `mask` by its newest, and the batch's `min_version`
tells the workers which tokens carry no loss. A record without generated tokens never expires. Under `wait` the master
holds the step until no running rollout would expire; the check remains as a last safeguard.

The order (`take`) decides which live records a step takes. Those that could not wait for another step are taken before
all others, so no order loses a rollout that this step can train or trains a stale token. Within the batch the order is
the data order.

Reports. The gate records the end of each rollout, also in the ledger. Master and manager die and begin together, so a
report needs no acknowledgement of its own: what a checkpoint does not have did not happen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from asyncrl.api.trajectory import GENERATED, POLICY_SERVERS, policy_of
from asyncrl.comm.ended_rollouts import DropReason, PolicyTokens, RecentIds, RolloutCounts, ids_remembered
from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply import R, Request, RequestClient, RequestTimeout
from asyncrl.comm.waits import ANSWER_S, BURST_S, CALL_S, GATHER_S, HOLD_S
from asyncrl.data.prompt_queue import UsedPrompts
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import (
    CloseGate,
    ConsumedReply,
    ConsumedReport,
    DroppedRollout,
    EndReport,
    GateCheckpoint,
    ReceivedReport,
    ReceivedRollout,
    RunBegin,
    StatusRequest,
    TrainedRollout,
)
from asyncrl.master.settings import OnStale
from asyncrl.runtime.process.waiting import StopRequested, cancel, or_stop
from asyncrl.trainer.messages import Discard, PollBuffer, PolledBuffer, RolloutRecord

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drop:
    """A received rollout that will not be trained, and why."""

    record: RolloutRecord
    reason: str

    @property
    def message(self) -> DroppedRollout:
        """The report of this drop to the manager."""
        return DroppedRollout(self.record.rollout_id, self.reason)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The rollouts of the step that makes `version` + 1, in data order; tokens below `min_version` carry no loss."""

    version: int
    min_version: int
    records: tuple[RolloutRecord, ...]


class SampleBuffer:
    """The metadata of received rollouts, and the decision which of them are trained next.

    Args:
        batch_size: B, rollouts per train step.
        eta: largest allowed age of a trained token, in versions.
        remembered: number of finished rollout ids kept to recognise late copies; None: `ids_remembered`.
    """

    def __init__(
        self,
        batch_size: int,
        eta: int,
        on_stale: OnStale,
        remembered: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.received = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._eta, self._on_stale = eta, on_stale
        self._live: dict[str, RolloutRecord] = {}
        self._by_age: dict[int, dict[str, RolloutRecord]] = {}  # by the version that decides when they expire
        self._version = 0  # of the policy, as far as is known
        self._taken: dict[str, RolloutRecord] = {}
        self._finished: RecentIds[None] = RecentIds(
            ids_remembered(batch_size, eta) if remembered is None else remembered
        )
        self.drops: list[Drop] = []
        """Drops that the manager may not know of yet."""

    def __len__(self) -> int:
        """Live records."""
        return len(self._live)

    def add(self, records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
        """Add received rollouts; return second copies, which are to be freed at the workers that hold them."""
        copies = []
        for record in records:
            known = self._live.get(record.rollout_id) or self._taken.get(record.rollout_id)
            if known or record.rollout_id in self._finished:
                if known is None or known.head != record.head:  # else a lost reply was sent again
                    copies.append(record)
                continue
            self.received += 1
            if self._expires(record, self._version):
                self._drop(record, DropReason.stale)
                continue
            self._live[record.rollout_id] = record
            if record.generated_tokens:
                self._by_age.setdefault(self._decisive(record), {})[record.rollout_id] = record
        return copies

    def expire(self, version: int) -> None:
        """Drop the live records that neither the step at `version` nor a later one may train.

        The cost of a call grows with the number of expired records, not with the number of live ones.
        """
        self._version = max(self._version, version)
        while self._by_age and version - (oldest := min(self._by_age)) > self._eta:
            for record in self._by_age.pop(oldest).values():
                del self._live[record.rollout_id]
                self._drop(record, DropReason.stale)

    @property
    def missing(self) -> int:
        """Number of rollouts that a batch lacks."""
        return max(0, self.batch_size - len(self._live))

    def live(self) -> list[RolloutRecord]:
        """Return the live records."""
        return list(self._live.values())

    def take(self, version: int, ranks: Mapping[str, float] | None = None) -> TrainBatch | None:
        """Take the batch of the step at `version`; None while fewer than B live records are left after the expiry
        check.

        The order is the user's (`buffer.order.path`), then the oldest tokens first, then the data order. The oldest
        expire next, so this order loses the fewest as stale. `ranks` has the user's, by rollout id; records without a
        rank, which arrived later, come last.

        Example, η = 2, B = 2, version 3, no ranks: of live records with oldest versions {a: 3, b: 2, c: 0, d: 3} (data
        order a b c d), c is stale (3 - 0 > 2), b goes first, then a; d waits.
        """
        self.expire(version)
        if len(self._live) < self.batch_size:
            return None
        known = ranks or {}

        def turn(record: RolloutRecord) -> tuple[bool, float, int, int, str]:
            can_wait, rank = not self._expires(record, version + 1), known.get(record.rollout_id, inf)
            return can_wait, rank, record.oldest_version, *_data_order(record)

        chosen = sorted(self._live.values(), key=turn)[: self.batch_size]
        for record in chosen:
            self._taken[record.rollout_id] = self._live.pop(record.rollout_id)
            if record.generated_tokens:
                same_age = self._by_age[self._decisive(record)]
                del same_age[record.rollout_id]
                if not same_age:
                    del self._by_age[self._decisive(record)]
        return TrainBatch(version, max(0, version - self._eta), tuple(sorted(chosen, key=_data_order)))

    def mark_trained(self, batch: TrainBatch) -> None:
        """Record that the step of `batch` is complete; each of its records was taken once."""
        for record in batch.records:
            del self._taken[record.rollout_id]
            self._finished.put(record.rollout_id, None)
            self.trained += 1

    def describe(self) -> str:
        """Describe the counters, for a message about a stall."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"{len(self._live)} of {self.batch_size} rollouts in the buffer "
            f"({self.received} received, {self.trained} trained, {len(self._taken)} in training, dropped: {reasons})"
        )

    def _expires(self, record: RolloutRecord, version: int) -> bool:
        """True if the step at `version` may not train `record`."""
        return bool(record.generated_tokens) and version - self._decisive(record) > self._eta

    def _decisive(self, record: RolloutRecord) -> int:
        """Return the version of the token whose age decides when the record expires."""
        return record.newest_version if self._on_stale == OnStale.mask else record.oldest_version

    def _drop(self, record: RolloutRecord, reason: str) -> None:
        self.dropped[reason] += 1
        self.drops.append(Drop(record, reason))
        self._finished.put(record.rollout_id, None)


def _data_order(record: RolloutRecord) -> tuple[int, str]:
    return (record.order, record.rollout_id)


class _Head:
    """Calls to one head, each repeated until it is answered.

    Attributes:
        silent: True if the head has not answered for `CALL_S`.
    """

    def __init__(self, client: RequestClient) -> None:
        self.client = client
        self.silent = False
        self._refreshing: list[asyncio.Future[None]] = []
        self._kick = asyncio.Event()

    def refresh(self) -> asyncio.Future[None]:
        """Have the next poll begin now; return a future that its reply completes."""
        answer = asyncio.get_running_loop().create_future()
        self._refreshing.append(answer)
        self._kick.set()
        return answer

    def take_refreshes(self) -> list[asyncio.Future[None]]:
        """Return the futures of `refresh` that a poll beginning now completes."""
        self._kick.clear()
        refreshing, self._refreshing = self._refreshing, []
        return refreshing

    async def poll(self, request: PollBuffer) -> PolledBuffer | None:
        """Make one poll; None if `refresh` was called meanwhile. An abandoned poll loses nothing, as it is not
        acknowledged.
        """
        call = self.call(request, request.timeout_s)
        if not request.timeout_s:
            return await call
        poll, kick = asyncio.ensure_future(call), asyncio.ensure_future(self._kick.wait())
        try:
            await asyncio.wait({poll, kick}, return_when=asyncio.FIRST_COMPLETED)
            return poll.result() if poll.done() else None
        finally:
            await cancel(poll, kick)

    async def pace(self, awaited: asyncio.Event) -> None:
        """Wait for a burst to gather, unless a step waits (`awaited`) or a refresh is requested."""
        urgent = [asyncio.ensure_future(event.wait()) for event in (awaited, self._kick)]
        try:
            await asyncio.sleep(BURST_S)
            await asyncio.wait(urgent, timeout=GATHER_S - BURST_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*urgent)

    async def call(self, request: Request[R], hold_s: float = 0.0) -> R:
        """Repeat the call until it is answered; a repeated call does no harm."""
        while True:
            try:
                reply = await self.client.call(request, timeout_s=hold_s + CALL_S)
            except RequestTimeout as error:
                self.silent = True
                _log.warning("%s; asking again", error)
            else:
                self.silent = False
                return reply


class Collector:
    """Polls into `buffer`; counts the received rollouts in `generated_tokens` and `generated_samples`."""

    def __init__(self, heads: Sequence[RequestClient], buffer: SampleBuffer, manager: ManagerClient) -> None:
        self.generated_tokens = 0
        self.generated_samples = 0
        self._heads = [_Head(client) for client in heads]
        self._buffer, self._manager = buffer, manager
        self._changed = asyncio.Event()
        self._awaited = asyncio.Event()
        self._missing = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def held(self) -> list[RolloutRecord]:
        """Return what the workers hold, for the manager's beginning. The polls bring all of it again."""
        replies = await asyncio.gather(*(head.call(PollBuffer(0, 0.0)) for head in self._heads))
        return list({record.rollout_id: record for reply in replies for record in reply.rollouts}.values())

    def start(self) -> None:
        """Begin to poll: the manager has begun, and says what counts."""
        self._tasks = [asyncio.create_task(self._follow(head)) for head in self._heads]

    @property
    def silent(self) -> list[int]:
        """Return the heads that have not answered for `CALL_S`, by data index."""
        return [index for index, head in enumerate(self._heads) if head.silent]

    async def close(self) -> None:
        """Stop polling."""
        await cancel(*self._tasks)

    def check(self) -> None:
        """Raise the error that ended a worker's polls, if there is one. A silent worker is no error (`silent`)."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def changed(self, missing: int) -> None:
        """Wait until a record arrives after the last call; `missing` is the number that the step still needs."""
        self._missing = missing
        self._awaited.set()
        try:
            await self._unless_failed(self._changed.wait())
        finally:
            self._awaited.clear()
        self._changed.clear()

    async def refresh(self) -> None:
        """Have every worker answer a poll that begins after this call, so that the rollouts they hold now are in the
        buffer.
        """
        await self._unless_failed(asyncio.gather(*(head.refresh() for head in self._heads)))

    async def discard(self, records: Iterable[RolloutRecord], limit_s: float) -> None:
        """Have the workers free the tensors of `records`, each within `limit_s`."""
        for head, rollouts in _by_head(records):
            await self._heads[head].client.call(Discard(rollouts), timeout_s=limit_s)

    async def _follow(self, head: _Head) -> None:
        cursor = 0
        while True:
            poll = PollBuffer(cursor, 0.0)
            if not (refreshing := head.take_refreshes()):  # for one rollout, or for the head's share if a step waits
                share = self._missing // len(self._heads) if self._awaited.is_set() else 1
                poll = PollBuffer(cursor, HOLD_S, share, GATHER_S)
            reply = await head.poll(poll)
            if reply is None:
                continue
            cursor = reply.cursor
            await self._take_in(reply.rollouts)
            for answer in refreshing:
                if not answer.done():
                    answer.set_result(None)
            if reply.rollouts:
                await head.pace(self._awaited)

    async def _take_in(self, records: Sequence[RolloutRecord]) -> None:
        arrived = ReceivedReport(list(map(received, records)))
        refused = (await self._manager.call(arrived)).refused if records else []
        before = self._buffer.received
        count = [record for record in records if record.rollout_id not in refused]
        copies = self._buffer.add(count)
        if self._buffer.received > before:
            self.generated_tokens += sum(record.generated_tokens for record in count)
            self.generated_samples += sum(len(record.lengths) for record in count)
            self._changed.set()
        unused = [*copies, *(record for record in records if record.rollout_id in refused)]
        for head, rollouts in _by_head(unused):
            await self._heads[head].call(Discard(rollouts))

    async def _unless_failed(self, waiting: Awaitable[Any]) -> None:
        """Await `waiting`, or raise the error of a polling task."""
        task = asyncio.ensure_future(waiting)
        try:
            done, _ = await asyncio.wait({task, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                ended.result()
        finally:
            await cancel(task)


class CountsError(RuntimeError):
    """A rollout is unaccounted for at the end of the run."""


class Reports:
    """Calls the manager; a `version` argument is always the model's current version.

    Args:
        collector: polls the ranks, and has them free dropped rollouts.
        limit_s: time limit of each call.

    Attributes:
        counts: the gate's counters in its newest reply.
        idle_s: seconds so far in which the gate let no rollout run, in its newest reply.
        versions_in_use: versions that servers serve or load, in its newest reply.
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
        self.counts, self.idle_s, self.versions_in_use = RolloutCounts(), 0.0, set[int]()
        self.checkpoint = GateCheckpoint(used=UsedPrompts().to_json())
        self._manager, self._collector, self._buffer, self._stop = manager, collector, buffer, stop
        self._limit_s, self._begun = limit_s, False

    def restore(self, trained: int, checkpoint: GateCheckpoint) -> None:
        """Continue from `checkpoint`, with the counters that the gate begins with: B trained per version, even if B was
        different at the time.
        """
        self.checkpoint = checkpoint
        self.counts = checkpoint.counts(trained)

    async def look(self) -> None:
        """Ask for the manager's status without a report."""
        status = await or_stop(self._manager.call(StatusRequest()), self._stop, self._limit_s)
        self.idle_s, self.versions_in_use = status.gate.idle_s, status.versions_in_use

    async def begin(self, version: int) -> None:
        """Bring the manager the checkpoint and the rollouts that the ranks hold, unless that is done; then it opens its
        gate, and says which of them count.
        """
        if self._begun:
            return
        held = list(map(received, await self._collector.held()))
        await self._manager.call(RunBegin(version, self.checkpoint, held))
        self._begun = True
        self._collector.start()

    async def trained(self, batch: TrainBatch) -> None:
        """Report the complete step of `batch`, and what the buffer dropped; have the ranks free the latter."""
        version, trained = batch.version + 1, [trained_rollout(record) for record in batch.records]
        reply = await self._send(version, trained)
        assert reply.checkpoint is not None, "the gate answers a step with its checkpoint"
        self.checkpoint = reply.checkpoint

    async def dropped(self, version: int) -> None:
        """Report what the buffer drops, which takes up room at the gate, and have the ranks free it."""
        while self._buffer.drops:
            await self._send(version, [])

    async def end(self, version: int) -> None:
        """Close the gate and account for every rollout.

        Raises:
            CountsError: the manager does not answer.
        """
        try:
            await self._answered(self._end(version))
        except TimeoutError as error:
            raise CountsError("the GserverManager did not account for the rollouts at the end of the run") from error

    async def _end(self, version: int) -> None:
        await self.begin(version)  # a stop request may have come before the beginning had done it
        await self._manager.call(CloseGate())
        await self.dropped(version)
        self.counts = await self._manager.call(EndReport(version))

    async def _send(self, version: int, trained: list[TrainedRollout]) -> ConsumedReply:
        """Send one report and process the reply. Drops that the manager may not have stay for the next report."""
        drops = list(self._buffer.drops)
        report = ConsumedReport(version, trained, [drop.message for drop in drops])
        reply = await self._answered(self._manager.call(report))
        self.counts, self.idle_s, self.versions_in_use = reply.counts, reply.idle_s, set(reply.versions_in_use)
        del self._buffer.drops[: len(drops)]
        if drops:
            await self._collector.discard([drop.record for drop in drops], self._limit_s)
        return reply

    async def _answered(self, call: Awaitable[_T]) -> _T:
        """Await `call`, after a stop request for `ANSWER_S` at most."""
        task = asyncio.ensure_future(call)
        try:
            return await or_stop(asyncio.shield(task), self._stop, self._limit_s)
        except StopRequested:
            async with asyncio.timeout(min(ANSWER_S, self._limit_s)):
                return await asyncio.shield(task)
        finally:
            await cancel(task)


def check_counts(totals: RolloutCounts, trained: int) -> None:
    """Check that every rollout is accounted for, and that the gate saw `trained` of them reach the optimizer.

    Raises:
        CountsError: the counters do not add up; the message names them.
    """
    if not totals.balanced or totals.running or totals.finished_untrained:
        raise CountsError(
            f"the rollout counts do not balance: submitted {totals.submitted}, trained {totals.trained}, dropped "
            f"{sum(totals.dropped.values())} {dict(totals.dropped)}, abandoned {totals.abandoned}, "
            f"still running {totals.running}, finished but untrained {totals.finished_untrained}"
        )
    if totals.trained != trained:
        raise CountsError(f"the gate counts {totals.trained} trained rollouts, the trainer {trained}")


def _by_head(records: Iterable[RolloutRecord]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the rollouts of `records` by the head that holds them."""
    of_head: dict[int, list[str]] = {}
    for record in records:
        of_head.setdefault(record.head, []).append(record.rollout_id)
    return [(head, tuple(rollouts)) for head, rollouts in sorted(of_head.items())]


def received(record: RolloutRecord) -> ReceivedRollout:
    """Return the rollout of `record` as the manager expects it."""
    oldest = max(0, record.oldest_version)
    return ReceivedRollout(record.rollout_id, record.prompt_id, record.order, oldest, max(1, sum(record.lengths)))


def trained_rollout(record: RolloutRecord) -> TrainedRollout:
    """Return what the ledger says about a trained rollout."""
    samples, rewards = len(record.rewards), record.episode_rewards
    reward = sum(rewards) / len(rewards)
    head = (record.rollout_id, record.prompt_id, record.order, record.version_tokens)
    return TrainedRollout(*head, len(rewards), samples, reward, _policy_servers(record.metrics), _policies(record))


def _policy_servers(metrics: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the oldest and newest version of each policy that answered in a rollout with these metrics."""
    versions: dict[str, dict[str, int]] = {}
    for name, number in metrics.items():
        if name.startswith(POLICY_SERVERS):
            policy, _, which = name.removeprefix(POLICY_SERVERS).partition("/")
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
