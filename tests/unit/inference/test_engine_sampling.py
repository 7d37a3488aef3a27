"""Sampling: the distribution drawn from, the log-probabilities reported, and the streams that draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.inference import random_streams as seeds
from asyncrl.inference.embedded.rows import RowSampling, sample, signed_64, uniforms_TR
from tests.examples import examples

PROBABILITIES = torch.tensor([0.05, 0.4, 0.02, 0.25, 0.1, 0.18])
DRAWS = 20_000


def rows(count: int, *, top_p: float = 1.0, top_k: int = 6, min_p: float = 0.0) -> RowSampling:
    filtered = top_p < 1.0 or top_k < 6 or min_p > 0.0
    return RowSampling(
        inverse_temperature=None,
        greedy=None,
        filtered=torch.ones(count, dtype=torch.bool) if filtered else None,
        top_p=torch.full((count,), top_p),
        top_k=torch.full((count,), top_k),
        min_p=torch.full((count,), min_p),
        all_greedy=False,
    )


@given(seed=st.integers(0, 2**63 - 1), offset=st.integers(0, 10_000))
@settings(max_examples=examples(50))
def test_tensor_streams_equal_the_python_stream_bit_for_bit(seed: int, offset: int) -> None:
    drawn = uniforms_TR(torch.tensor([signed_64(seed)]), torch.tensor([offset]), 5)[:, 0].tolist()
    assert drawn == [seeds.uniform(seed, offset + position) for position in range(5)]
    assert all(0.0 <= number < 1.0 for number in drawn)


def test_an_offset_continues_the_stream() -> None:
    whole = uniforms_TR(torch.tensor([5, 6]), torch.tensor([0, 0]), 20)
    rest = uniforms_TR(torch.tensor([5, 6]), torch.tensor([12, 7]), 8)
    assert torch.equal(rest[:, 0], whole[12:, 0])
    assert torch.equal(rest[:, 1], whole[7:15, 1])


def test_neighbouring_seeds_and_positions_look_independent_and_uniform() -> None:
    numbers = uniforms_TR(torch.arange(200), torch.zeros(200, dtype=torch.long), 200)
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert abs(numbers.var().item() - 1 / 12) < 0.003
    correlations = torch.corrcoef(numbers[:, :40].T).fill_diagonal_(0.0)
    assert correlations.abs().max() < 0.35


def test_derived_seeds_differ_and_fit_a_signed_integer() -> None:
    derived = {seeds.derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(derived) == 2500
    assert all(0 <= seed < 2**63 for seed in derived)


@pytest.mark.parametrize(
    ("settings_", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.7}, [1, 3, 5]),
        ({"min_p": 0.3}, [1, 3, 5]),
        ({"top_k": 3, "top_p": 0.6}, [1, 3]),
    ],
)
def test_frequencies_are_those_of_the_cut_distribution_and_logprobs_those_of_the_whole_one(
    settings_: dict[str, float], kept: list[int]
) -> None:
    uniforms = uniforms_TR(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.long), 1)[0]
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    tokens, logprobs = sample(logits, uniforms, rows(DRAWS, **settings_))  # type: ignore[arg-type]
    expected = torch.zeros(6)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    frequencies = torch.bincount(tokens, minlength=6) / DRAWS
    assert (frequencies - expected).abs().max() < 4 * math.sqrt(0.25 / DRAWS)
    assert set(tokens.tolist()) == set(kept)
    torch.testing.assert_close(logprobs, PROBABILITIES[tokens].log())


def test_forbidden_tokens_are_never_drawn_and_logprobs_are_of_the_others_alone() -> None:
    uniforms = uniforms_TR(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.long), 1)[0]
    allowed, forbidden = [0, 2, 3], torch.tensor([[False, True, False, False, True, True]])
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    for parameters in (rows(DRAWS), rows(DRAWS, min_p=0.1)):
        tokens, logprobs = sample(logits, uniforms, replace(parameters, forbidden=forbidden))
        shares = PROBABILITIES[allowed] / PROBABILITIES[allowed].sum()
        kept = shares if parameters.filtered is None else torch.where(shares < 0.1 * shares.max(), 0.0, shares)
        frequencies = torch.bincount(tokens, minlength=6)[allowed] / DRAWS
        assert (frequencies - kept / kept.sum()).abs().max() < 4 * math.sqrt(0.25 / DRAWS)
        torch.testing.assert_close(logprobs, shares[torch.searchsorted(torch.tensor(allowed), tokens)].log())


def test_a_row_draws_the_same_whether_or_not_a_neighbour_filters() -> None:
    uniforms = uniforms_TR(torch.arange(64), torch.zeros(64, dtype=torch.long), 1)[0]
    logits = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    plain = sample(logits, uniforms, rows(64))
    filtered = torch.zeros(64, dtype=torch.bool)
    filtered[0] = True
    mixed = RowSampling(None, None, filtered, torch.full((64,), 0.3), torch.full((64,), 6), torch.zeros(64), False)
    for with_neighbour, alone in zip(sample(logits, uniforms, mixed), plain, strict=True):
        assert torch.equal(with_neighbour[1:], alone[1:])


def test_greedy_rows_take_the_maximum_at_its_temperature_one_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    greedy = torch.tensor([True, False])
    parameters = RowSampling(
        torch.tensor([1.0, 2.0]), greedy, None, torch.ones(2), torch.full((2,), 3), torch.zeros(2), False
    )
    tokens, logprobs = sample(logits, torch.tensor([0.99, 0.999], dtype=torch.float64), parameters)
    assert tokens[0] == 1
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[1])
    torch.testing.assert_close(logprobs[1], (logits[1] * 2.0).log_softmax(-1)[tokens[1]])


def test_the_last_uniform_number_never_leaves_the_vocabulary_nor_picks_the_impossible() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    tokens, logprobs = sample(logits, torch.tensor([1.0 - 2.0**-53], dtype=torch.float64), rows(1))
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(math.log(0.5))
