"""How the master reaches the other processes: request-reply to workers, name resolution for what is announced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.request_reply import RequestClient
from asyncrl.rollout.messages import Evaluate, EvaluatedAnswer, EvaluationResult
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


class NothingEvaluated(RuntimeError):
    """No prompt of a set was answered."""


async def evaluate(workers: Sequence[RequestClient], name: str, version: int, timeout_s: float) -> EvaluationResult:
    """Evaluate `version` on the whole set `name`, of which each RolloutWorker does its share.

    Raises:
        NothingEvaluated: not one prompt of it makes a prompt that the agent answers.
        TimeoutError: it takes longer than `timeout_s`.
        Exception: a worker failed.
    """
    limit_s = timeout_s + GRACE_S
    try:
        async with asyncio.timeout(timeout_s):
            replies = await asyncio.gather(
                *(worker.call(Evaluate(name, version), timeout_s=limit_s) for worker in workers)
            )
    except TimeoutError as error:
        raise TimeoutError(f"no result within eval.timeout_s={timeout_s:g} s") from error
    shares = [share for share in replies if share.answers]
    left_out = sum(share.left_out for share in replies)
    if not shares:
        raise NothingEvaluated(f"none of the {left_out} rows of {name!r} was answered: they make no prompt")
    return EvaluationResult(
        answers=tuple(sorted((answer for share in shares for answer in share.answers), key=_row)),
        left_out=left_out,
        min_version=min(share.min_version for share in shares),
        max_version=max(share.max_version for share in shares),
    )


def _row(answer: EvaluatedAnswer) -> int:
    return answer.row


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
