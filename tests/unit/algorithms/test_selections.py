"""Selections over a minibatch against literal loops, and their independence of ranks and order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.inputs import SelectionInputs, SelectionOutput
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.examples import examples

PARAMS = {
    "none": {},
    "m2po": {"threshold": 0.05},
    "clip_cov": {"ratio": 0.2, "low": 0.1, "high": 1.5},
    "kl_cov": {"ratio": 0.2, "coef": 0.7},
}


def made(seed: int, size: int = 25) -> SelectionInputs:
    rng = np.random.default_rng(seed)
    behave = -rng.exponential(1.0, size)
    start = behave + 0.4 * rng.standard_normal(size)
    return SelectionInputs(*(torch.tensor(values) for values in (start, behave, rng.standard_normal(size))))


def select(name: str, inputs: SelectionInputs) -> SelectionOutput:
    return resolve("selection", name, PARAMS[name])(inputs)


def test_every_selection_is_tested_here() -> None:
    assert set(PARAMS) == set(known("selection"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("binding", [True, False])
def test_m2po_masks_the_largest_until_the_second_moment_is_small(seed: int, binding: bool) -> None:
    inputs = made(seed)
    found = resolve("selection", "m2po", {"threshold": 0.05, "binding": binding})(inputs)
    moved = (inputs.start_logprobs_T - inputs.behave_logprobs_T).tolist()
    A = inputs.advantages_T.tolist()
    left = [t for t in range(len(moved)) if not binding or (A[t] > 0 < moved[t]) or (A[t] < 0 > moved[t])]
    while left and sum(moved[t] ** 2 for t in left) / len(left) > 0.05:
        left.remove(max(left, key=lambda t: moved[t] ** 2))
    counted = [t for t in range(len(moved)) if not binding or A[t] * moved[t] > 0]
    assert torch.nonzero(~found.keep_T).flatten().tolist() == sorted({*counted} - {*left})
    assert left
    assert not found.keep_T.all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariances_are_over_the_minibatch(seed: int, name: str) -> None:
    inputs = made(seed)
    A, lp = inputs.advantages_T.tolist(), inputs.start_logprobs_T.tolist()
    cov = [(a - sum(A) / len(A)) * (p - sum(lp) / len(lp)) for a, p in zip(A, lp, strict=True)]
    within = [t for t in range(len(cov)) if name == "kl_cov" or 0.1 < cov[t] < 1.5]
    chosen = sorted(sorted(within, key=lambda t: cov[t], reverse=True)[: int(0.2 * len(cov))])
    found = select(name, inputs)
    if name == "kl_cov":
        assert found.keep_T.all()
        assert found.penalty_T is not None
        assert torch.nonzero(found.penalty_T).flatten().tolist() == chosen
        assert found.penalty_T[chosen].tolist() == pytest.approx([0.7] * len(chosen))
    else:
        assert torch.nonzero(~found.keep_T).flatten().tolist() == chosen


def test_kl_cov_takes_verls_tokens() -> None:
    """verl 0.9.1, `compute_policy_loss_kl_cov` with kl_cov_ratio 0.34 on the batch of test_recorded_values: it adds the
    penalty at tokens 0 and 2, as its gradient shows: -A r / 6 without, and 0.7 / 6 more with it.
    """
    logprobs, old = [-0.5, -1.2, -0.1, -2.0, -0.3, -0.9], [-0.9, -1.0, -0.4, -1.1, -0.35, -1.6]
    advantages = [1.0, 1.0, 1.0, -0.5, -0.5, -0.5]
    verl = [-0.2486374496068784, -0.136455125512997, -0.10830980126266719]
    verl += [-0.08278586168828339, 0.087605924698002, 0.1678127256225397]
    plain = [-a * math.exp(p - o) / 6 for a, p, o in zip(advantages, logprobs, old, strict=True)]
    there = [abs(with_it - without) > 1e-9 for with_it, without in zip(verl, plain, strict=True)]
    inputs = SelectionInputs(*(torch.tensor(values, dtype=torch.float64) for values in (logprobs, old, advantages)))
    found = resolve("selection", "kl_cov", {"ratio": 0.34, "coef": 0.7})(inputs)
    assert found.penalty_T is not None
    assert (found.penalty_T > 0).tolist() == there


@pytest.mark.parametrize("name", PARAMS)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 25), order=st.permutations(range(25)))
@settings(max_examples=examples(20), deadline=None)
def test_neither_order_nor_ranks_change_what_is_selected(name: str, seed: int, cut: int, order: list[int]) -> None:
    whole = made(seed)
    expected = select(name, whole)
    parts = [order[:cut], order[cut:]]
    fields = (whole.start_logprobs_T, whole.behave_logprobs_T, whole.advantages_T)
    brought: list[list[torch.Tensor]] = [[], []]

    def ask(rank: int, gather: object) -> SelectionOutput:
        return select(name, SelectionInputs(*(values[parts[rank]] for values in fields), gather=gather))

    for rank in range(2):  # until all that both bring is known, each brings what it can
        ask(rank, lambda values, rank=rank: brought[rank].append(values) or values)
    keeps = torch.empty(25, dtype=torch.bool)
    for rank in range(2):
        pairs = iter(zip(*brought, strict=True))
        output = ask(rank, lambda values, pairs=pairs: torch.cat(next(pairs)))
        keeps[parts[rank]] = output.keep_T
        if expected.penalty_T is not None:
            assert output.penalty_T is not None
            assert torch.equal(output.penalty_T, expected.penalty_T[parts[rank]])
    assert torch.equal(keeps, expected.keep_T)


def kept_by_m2po(log_ratios: list[float], threshold: float) -> list[bool]:
    """Which tokens m2po keeps that have these log-ratios and positive advantages."""
    l_T = torch.tensor(log_ratios, dtype=torch.float64)
    inputs = SelectionInputs(l_T - 1.0, torch.full_like(l_T, -1.0), torch.ones_like(l_T))
    kept: list[bool] = resolve("selection", "m2po", {"threshold": threshold})(inputs).keep_T.tolist()
    return kept


def test_m2po_keeps_a_second_moment_of_the_threshold_and_no_part_of_equal_tokens() -> None:
    assert kept_by_m2po([0.5, 0.5], 0.25) == [True, True]
    assert kept_by_m2po([0.1, 1.0, 1.0], 0.6) == [True, False, False], "0.505 with one of them, 0.67 with both"
    assert kept_by_m2po([0.0, 1.0], 0.6) == [True, False], "a token that has not moved is no part of the mean"
    assert kept_by_m2po([0.5, 0.25], 0.01) == [False, False]
    assert kept_by_m2po([1.0, -2.0], 0.01) == [False, True], "the update brings the second one back"


@pytest.mark.parametrize(("low", "high", "chosen"), [(1.0, 9.0, False), (0.0, 1.0, False), (0.5, 1.5, True)])
def test_a_covariance_at_a_bound_is_not_within(low: float, high: float, chosen: bool) -> None:
    """That of the first two is 1, that of the third 0."""
    start, A = [-1.0, -3.0, -2.0], [1.0, -1.0, 0.0]
    inputs = SelectionInputs(*(torch.tensor(values, dtype=torch.float64) for values in (start, start, A)))
    params = {"ratio": 1.0, "low": low, "high": high}
    assert (not resolve("selection", "clip_cov", params)(inputs).keep_T.all()) is chosen


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize(("ratio", "count"), [(0.001, 1), (0.119, 2), (1.0, 25)])
def test_a_share_is_rounded_down_and_is_at_least_one_token(name: str, ratio: float, count: int) -> None:
    params = {"ratio": ratio} | ({"low": -9.0, "high": 9.0} if name == "clip_cov" else {})
    found = resolve("selection", name, params)(made(0))
    assert int((~found.keep_T if found.penalty_T is None else found.penalty_T > 0).sum()) == count


def test_equal_policies_are_within_every_bound() -> None:
    inputs = made(0)
    same = SelectionInputs(inputs.behave_logprobs_T, inputs.behave_logprobs_T, inputs.advantages_T)
    assert select("m2po", same).keep_T.all()


@pytest.mark.parametrize("name", PARAMS)
def test_no_tokens_are_no_fault(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    assert select(name, SelectionInputs(nothing, nothing, nothing)).keep_T.shape == (0,)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("m2po", {"threshold": 0.0}, "threshold is"),
        ("clip_cov", {"ratio": 0.0}, "share of the tokens"),
        ("clip_cov", {"ratio": 1.1}, "share of the tokens"),
        ("kl_cov", {"ratio": 1.1}, "share of the tokens"),
        ("clip_cov", {"low": 2.0, "high": 1.0}, "set low <= high"),
        ("kl_cov", {"coef": -1.0}, "coef is"),
    ],
)
def test_bad_parameters_are_named(name: str, params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("selection", name, params)(made(0))


@pytest.mark.parametrize(
    ("name", "params"),
    [("m2po", {"threshold": 0.5}), ("clip_cov", {"low": 1.0, "high": 1.0}), ("kl_cov", {"coef": 0.0})],
)
def test_parameters_at_the_end_of_their_range_are_taken(name: str, params: dict[str, float]) -> None:
    assert resolve("selection", name, params)(made(0)).keep_T.any()
