"""Statistics of an evaluation: means always, accuracy and the unbiased pass@k if there is a verdict."""

from __future__ import annotations

import itertools

import pytest

from asyncrl.master.evaluations import evaluation_metrics, evaluation_statistics, pass_at_k, pass_ks
from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult


def result(*answers: tuple[int, float, bool | None]) -> EvaluationResult:
    """Answers of (row, reward, verdict), of 4 tokens each; the last one is cut off."""
    last = len(answers) - 1
    reported = (EvaluatedAnswer(row, reward, right, 4, n == last) for n, (row, reward, right) in enumerate(answers))
    return EvaluationResult(tuple(reported), 0, 3, 3)


def test_graded_rewards_are_told_as_a_mean_and_have_no_accuracy() -> None:
    assert evaluation_statistics("essays", result((0, 1.0, None), (1, 0.25, None))) == {
        "eval/essays/reward_mean": 0.625,
        "eval/essays/len_mean": 4.0,
        "eval/essays/truncated": 0.5,
        "eval/essays/prompts": 2.0,
    }


def test_what_agents_tools_and_rewards_counted_is_a_mean_over_the_answers_that_have_it() -> None:
    answers = (
        EvaluatedAnswer(0, 1.0, None, 4, False, {"tool/search/calls": 2.0, "agent/turns": 3.0, "reward/style": 0.5}),
        EvaluatedAnswer(1, 0.0, None, 4, False, {"agent/turns": 1.0, "reward/style": 0.25}),
    )
    measured = evaluation_statistics("qa", EvaluationResult(answers, 0, 3, 3))
    assert measured["eval/qa/agent/turns"] == 2.0
    assert measured["eval/qa/reward/style"] == 0.375
    assert measured["eval/qa/tool/search/calls"] == 2.0


def test_accuracy_is_what_the_verdict_says_not_what_the_reward_is_worth() -> None:
    measured = evaluation_statistics("maths", result((0, 0.5, True), (1, 1.2, False), (2, 0.0, None), (3, 1.0, True)))
    assert measured["eval/maths/accuracy"] == 0.5, "an episode that ended without a verdict is not right"
    assert measured["eval/maths/reward_mean"] == pytest.approx(0.675)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_a_right_answer(n: int) -> None:
    """By its definition: over all subsets of k of the n answers."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_several_answers_give_pass_at_powers_of_two_and_all() -> None:
    assert [list(pass_ks(n)) for n in (1, 2, 6, 8)] == [[], [2], [2, 4, 6], [2, 4, 8]]
    of_3 = [(0, 1.0, True), (0, 0.0, False), (0, 0.0, False), (1, 0.0, False), (1, 0.0, False), (1, 0.0, False)]
    measured = evaluation_statistics("maths", result(*of_3))
    assert measured["eval/maths/accuracy"] == pytest.approx(1 / 6)
    assert measured["eval/maths/pass@2"] == pytest.approx((2 / 3 + 0) / 2)
    assert measured["eval/maths/pass@3"] == pytest.approx(0.5)
    assert measured["eval/maths/prompts"] == 2.0


@pytest.mark.parametrize("n", [1, 3, 4])
def test_an_evaluation_measures_what_the_settings_may_name(n: int) -> None:
    measured = evaluation_statistics("held_out", result(*[(0, 1.0, True)] * n))
    assert measured.keys() == {f"eval/held_out/{metric}" for metric in evaluation_metrics(n)}
