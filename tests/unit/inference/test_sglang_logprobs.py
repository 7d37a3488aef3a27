from __future__ import annotations

import pytest

from asyncrl.api.generation import SamplingParams
from asyncrl.inference.sglang.logprobs import (
    MAX_SUPPORT,
    UNBOUNDED_TOP_K,
    behaviour_logprobs,
    sampling_mask_fields,
)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1),
    ],
)
def test_nothing_is_asked_for_where_nothing_is_cut_off(sampling: SamplingParams) -> None:
    assert sampling_mask_fields(sampling) == (False, {})


@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)])
def test_a_cut_without_top_k_asks_for_the_support_within_a_bounded_top_k(sampling: SamplingParams) -> None:
    assert sampling_mask_fields(sampling) == (True, {"top_k": UNBOUNDED_TOP_K})


def test_a_top_k_within_the_bound_is_kept() -> None:
    assert sampling_mask_fields(SamplingParams(top_k=50)) == (True, {"top_k": 50})
    with pytest.raises(ValueError, match=f"top_k={MAX_SUPPORT + 1}.*use {MAX_SUPPORT} or less"):
        sampling_mask_fields(SamplingParams(top_k=MAX_SUPPORT + 1))


def test_the_captured_log_probabilities_are_preferred_to_those_before_the_cut() -> None:
    plain = {"output_token_logprobs": [[-1.5, 7, None], [-0.5, 3, None]]}
    assert behaviour_logprobs(plain) == [-1.5, -0.5]
    assert behaviour_logprobs(plain | {"output_token_sampling_logprobs": [-1.0, -0.25]}) == [-1.0, -0.25]


def test_a_reply_without_log_probabilities_is_an_error() -> None:
    with pytest.raises(KeyError, match="output_token_logprobs"):
        behaviour_logprobs({"completion_tokens": 3})
