"""The calls that a RolloutWorker serves, with their replies."""

from __future__ import annotations

from msgspec import Struct

from asyncrl.comm.request_reply import Done, Reply, Request


class EvaluatedAnswer(Struct, frozen=True):
    """One answer of an evaluation.

    Attributes:
        row: the prompt's row in its set.
        reward: reward of the whole episode.
        right: result of the verdicts among the rewards; None without any.
        tokens: number of generated tokens.
        truncated: True if a length limit cut it off.
        metrics: counts of its agent, tools and conversation, and its rewards by name, as for a trained rollout.
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
        answers: answers by row.
        left_out: number of rows without a valid prompt, or whose prompt the agent rejected.
        min_version, max_version: oldest and newest version that answered.
    """

    answers: tuple[EvaluatedAnswer, ...]
    left_out: int
    min_version: int
    max_version: int


class StillThere(Request[Done], frozen=True):
    """Ask for a sign of life of the worker's main loop, which plays the episodes."""


class Evaluate(Request[EvaluationResult], frozen=True):
    """Answer this worker's share of the evaluation set `name` under policy `version` or newer."""

    name: str
    version: int
