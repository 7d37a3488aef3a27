"""When to leave the minibatch loop early: the policy has moved too far, or too few samples carry the weights.

Decided on reduced statistics of a minibatch, equal on all ranks, before its optimizer step: the step is then skipped,
and so are the minibatches that follow. Plain numbers, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping


def weight_variance(weight_mean: float, weight_square_mean: float) -> float:
    """Variance of w / mean(w); 1 / (1 + it) is Kish's effective sample size over n, so at 1 half the tokens count."""
    return max(weight_square_mean / weight_mean**2 - 1.0, 0.0) if weight_mean > 0.0 else 0.0


def should_stop(stats: Mapping[str, float], *, max_kl: float = 0.0, max_weight_variance: float = 0.0) -> str | None:
    """The reason to stop, or None to go on.

    Args:
        stats: reduced statistics of the objective (`stats.values`).
        max_kl: bound on `ppo/approx_kl` in nats per token; 0 for no bound.
        max_weight_variance: bound on the relative variance of the importance weights pi / pi_behave; 0 for no bound.
    """
    kl = stats["ppo/approx_kl"]
    if max_kl and not kl <= max_kl:
        return f"ppo/approx_kl {kl:.4g} is above {max_kl:.4g}"
    variance = weight_variance(stats["ppo/importance_mean"], stats["ppo/importance_square_mean"])
    if max_weight_variance and not variance <= max_weight_variance:
        return f"variance of the importance weights {variance:.4g} is above {max_weight_variance:.4g}"
    return None
