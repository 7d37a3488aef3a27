"""The call that a RolloutWorker serves, with its reply."""

from __future__ import annotations

from asyncrl.comm.request_reply.messages import Reply, Request


class EvaluationResult(Reply, frozen=True):
    """One evaluation, or a worker's share of it.

    Attributes:
        rewards: per prompt.
        lengths: tokens of each answer.
        min_version, max_version: the versions that really answered.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    min_version: int
    max_version: int


class Evaluate(Request[EvaluationResult], frozen=True):
    """Answer this worker's share of the held-out set greedily under policy `version` or newer."""

    version: int
