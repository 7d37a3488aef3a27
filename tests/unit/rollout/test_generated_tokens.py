"""Samples of several trained policies are compared with what each policy generated in the rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.api import Completion, EpisodeError, FinishReason, Sample
from asyncrl.rollout.policy_answers import PolicyAnswers


def answer(*tokens: int, logprob: float = -0.5, version: int = 3) -> Completion:
    return Completion(list(tokens), [logprob] * len(tokens), [version] * len(tokens), FinishReason.stop)


def sample(*answers: Completion, group: str = "") -> Sample:
    """A conversation of these answers, each after two tokens of the environment."""
    tokens, mask, logprobs, versions = [], [], [], []
    for each in answers:
        count = len(each.token_ids)
        tokens += [7, 8, *each.token_ids]
        mask += [0, 0, *[1] * count]
        logprobs += [0.0, 0.0, *each.logprobs]
        versions += [-1, -1, *each.versions]
    columns = (np.array(tokens, np.int32), np.array(mask, np.uint8), np.array(logprobs, np.float32))
    return Sample(*columns, np.array(versions, np.int32), reward=1.0, group=group)


SOLVED, JUDGED = answer(1, 2, 2, logprob=-0.1), answer(2, 5, logprob=-0.7)


@pytest.fixture
def generated() -> PolicyAnswers:
    made = PolicyAnswers(("judge",))
    made.add("", [SOLVED, answer(9)])
    made.add("judge", [JUDGED])
    made.add("past", [answer(4)])
    return made


def test_samples_of_each_policys_own_answers_pass(generated: PolicyAnswers) -> None:
    own = [sample(SOLVED, answer(9)), sample(JUDGED, group="judge/right")]
    generated.check(own)
    generated.check(own[:1])  # an agent may return some samples only
    generated.check([])
    of_policy_server = {f"policy_server/past/{which}version": 3.0 for which in ("", "oldest_", "newest_")}
    assert generated.metrics() == of_policy_server | {"rollout/generated/actor": 4.0, "rollout/generated/judge": 2.0}


@pytest.mark.parametrize(
    ("strange", "count"),
    [
        (sample(SOLVED, group="judge"), 3),
        (sample(JUDGED), 2),
        (sample(JUDGED, JUDGED, group="judge"), 2),
        (sample(answer(2, 5, logprob=-0.6), group="judge"), 2),
        (sample(answer(2, 5, logprob=-0.7, version=2), group="judge"), 2),
        (sample(answer(4), group="judge"), 1),
        (sample(answer(2, 6, logprob=-0.7), group="judge"), 1),
    ],
    ids=[
        "of the solver",
        "of the judge",
        "twice",
        "another log-probability",
        "another version",
        "an opponent's",
        "token",
    ],
)
def test_tokens_that_a_policy_did_not_generate_are_refused(
    generated: PolicyAnswers, strange: Sample, count: int
) -> None:
    with pytest.raises(EpisodeError, match=f"with {count} tokens that this policy did not generate"):
        generated.check([sample(answer(9)), strange])


def test_two_policies_that_change_places_are_refused(generated: PolicyAnswers) -> None:
    own = [sample(SOLVED), sample(JUDGED, group="judge")]
    with pytest.raises(EpisodeError, match=r"samples of the run's own policy \(comparison group ''\) with 2 tokens"):
        generated.check([replace(each, group=other.group) for each, other in zip(own, own[::-1], strict=True)])


def test_a_run_with_one_trained_policy_records_nothing() -> None:
    alone = PolicyAnswers(())
    alone.add("", [SOLVED])
    alone.check([sample(JUDGED)])  # an agent may train on demonstrations
    assert alone.metrics() == {}
