"""How the master reaches the other processes: request-reply to workers, name resolution for what is announced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.request_reply import RequestClient
from asyncrl.rollout.messages import Evaluate, EvaluationResult
from asyncrl.runtime.worker import AsyncWorker

GRACE_S = 5.0
"""Beyond the limit of an evaluation, so that it is the evaluation's own limit that ends it."""


async def connect(worker: AsyncWorker, kind: str, count: int) -> list[RequestClient]:
    """Clients of the `count` workers of `kind`, by index, once all have registered.

    Raises:
        NameResolveTimeout: one did not within `system.start_timeout_s`.
        StopRequested: `worker` was asked to stop.
    """
    keys = [names.worker_key(kind, index) for index in range(count)]
    found = [names.WorkerAddress.decode(await worker.registered(key)) for key in keys]
    return [RequestClient(at.endpoint, worker.security, name=key) for at, key in zip(found, keys, strict=True)]


async def evaluate(workers: Sequence[RequestClient], version: int, timeout_s: float) -> EvaluationResult:
    """Evaluate `version` on the whole held-out set, of which each RolloutWorker does its share.

    Raises:
        Exception: a worker failed, or is late.
    """
    limit_s = timeout_s + GRACE_S
    replies = await asyncio.gather(*(worker.call(Evaluate(version), timeout_s=limit_s) for worker in workers))
    shares = [share for share in replies if share.rewards]
    return EvaluationResult(
        rewards=tuple(reward for share in shares for reward in share.rewards),
        lengths=tuple(length for share in shares for length in share.lengths),
        min_version=min(share.min_version for share in shares),
        max_version=max(share.max_version for share in shares),
    )


class NameBoard:
    """Announces versions and the data state in name resolution; the entries outlive this process."""

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver

    def announce_version(self, version: int, path: str) -> None:
        """The actor's newest weights are in `path`."""
        published = names.PublishedVersion(version, path)
        self._resolver.add(names.model_version_key(names.ACTOR), published.encode(), replace=True)

    def announce_data_state(self, path: Path, dropped: Mapping[str, int]) -> None:
        """The RolloutWorkers may begin; the used prompts are in `path`. `dropped`: what the books begin with."""
        state = names.DataState(str(path), dict(dropped))
        self._resolver.add(names.DATA_STATE_KEY, state.encode(), replace=True)
