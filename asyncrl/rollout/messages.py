"""The call that a RolloutWorker serves, with its reply."""

from __future__ import annotations

from msgspec import Struct

from asyncrl.comm.request_reply.messages import Reply, Request


class EvaluatedAnswer(Struct, frozen=True):
    """One answer of an evaluation.

    Attributes:
        row: the prompt's row in its set.
        reward: the whole episode's.
        right: what the verdicts among the rewards said; None where there was none.
        tokens: generated ones.
        truncated: it was cut off by a length limit.
        metrics: what its agent, its tools, its conversation and its rewards by name counted, as of a trained rollout.
    """

    row: int
    reward: float
    right: bool | None
    tokens: int
    truncated: bool
    metrics: dict[str, float] = {}


class EvaluationResult(Reply, frozen=True):
    """One evaluation, or a worker's share of it.

    Attributes:
        answers: by row.
        left_out: rows that make no prompt, or whose prompt the agent rejected.
        min_version, max_version: the versions that really answered.
    """

    answers: tuple[EvaluatedAnswer, ...]
    left_out: int
    min_version: int
    max_version: int


class Evaluate(Request[EvaluationResult], frozen=True):
    """Answer this worker's share of the evaluation set `name` under policy `version` or newer."""

    name: str
    version: int
