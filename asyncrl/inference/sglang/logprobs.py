"""Behaviour log-probabilities from SGLang: of the distribution really sampled from, also under top-p, top-k and min-p.

`output_token_logprobs` are taken after the division by the temperature but before top-k, top-p and min-p cut the
distribution and renormalise it. With `return_sampling_mask` SGLang (0.5.23) also captures the support that the sampler
kept, and reports in `output_token_sampling_logprobs` the drawn token's log-probability within it, which is what PPO's
ratio needs. It asks for a bounded `top_k`, since it sends the support along: where the request has none, `top_k`
becomes `UNBOUNDED_TOP_K`. For a vocabulary up to that size nothing changes; for a larger one the tokens beyond it,
which a top-p or min-p sampler all but never reaches, cannot be drawn, and the values reported are exact for that.

Greedy requests (temperature 0) report the log-probability at temperature 1 and need none of this. A server that does
not know `return_sampling_mask` (the embedded engine) reports renormalised values in `output_token_logprobs` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.api.generation import SamplingParams

MAX_SUPPORT = 4096
"""Largest support that a server reports, its `--sampling-mask-max-tokens`."""
UNBOUNDED_TOP_K = MAX_SUPPORT // 2
"""Stands in for an unbounded top-k; half, as ties at the cut can keep a few tokens more than `top_k`."""


def truncates(sampling: SamplingParams) -> bool:
    """True if tokens are drawn from a cut distribution, so that its renormalisation counts."""
    return sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)


def sampling_mask_fields(sampling: SamplingParams) -> tuple[bool, dict[str, Any]]:
    """What a `/generate` request has to say so that the reply holds behaviour log-probabilities.

    Returns:
        Its `return_sampling_mask`, and fields that replace those of its `sampling_params`.

    Raises:
        ValueError: `top_k` exceeds `MAX_SUPPORT`.
    """
    if not truncates(sampling):
        return False, {}
    if sampling.top_k > MAX_SUPPORT:
        raise ValueError(
            f"rollout.sampling.top_k={sampling.top_k}: log-probabilities are known for at most {MAX_SUPPORT} tokens; "
            f"use {MAX_SUPPORT} or less, or -1"
        )
    top_k = sampling.top_k if sampling.top_k > 0 else UNBOUNDED_TOP_K
    return True, {"top_k": top_k}


def behaviour_logprobs(meta_info: Mapping[str, Any]) -> list[float]:
    """Log-probability of every output token under the distribution it was drawn from, from a reply's `meta_info`.

    Raises:
        KeyError: the reply holds no log-probabilities; the request lacked `return_logprob`.
    """
    captured = meta_info.get("output_token_sampling_logprobs")
    if captured is not None:
        return list(captured)
    return [entry[0] for entry in meta_info["output_token_logprobs"]]
