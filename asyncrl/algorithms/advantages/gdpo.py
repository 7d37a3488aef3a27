"""GDPO: each part of the reward is normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.arithmetic.packed import whiten
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage

PREFIX = "reward/"


@advantage("gdpo")
def gdpo(
    inputs: AdvantageInputs,
    *,
    parts: list[str] | None = None,
    weights: list[float] | None = None,
    std_eps: float = 1e-6,
) -> AdvantageOutput:
    """A = whiten(sum_k w_k (r_k - mean(group r_k)) / (std(group r_k) + std_eps)) over the parts r_k of the reward.

    Liu et al. 2026 (arXiv:2601.05242): if parts are summed first, a part with large values hides the others. Parts are
    columns (`rollout.columns: [reward/correct, reward/format]`), all of them or those that `parts` names; without any,
    the whole reward is the only part. A group of one episode has 0 before whitening, which covers all tokens of the
    global batch. Rewards of turns are not used.

    Raises:
        ValueError: a part is not a column, the numbers of weights and parts differ, or std_eps is not positive.
    """
    if std_eps <= 0.0:
        raise ValueError(f"std_eps is {std_eps}; it keeps groups of equal rewards finite, set it above 0 (1e-6)")
    samples = compared(inputs)
    groups = samples.groups
    columns = _parts(inputs.columns, parts) or [samples.returns_U]
    shares = [1.0] * len(columns) if weights is None else weights
    if len(shares) != len(columns):
        raise ValueError(f"gdpo has {len(columns)} parts of the reward and {len(shares)} weights; give one for each")
    total_U = samples.returns_U * 0.0
    for values_U, share in zip(columns, shares, strict=True):
        values_U = values_U.to(total_U.dtype)
        mean_E = groups.mean(groups.episodes(values_U))
        alone_E = groups.size(mean_E) == 1.0
        centred_U = torch.where(groups.spread(alone_E), 0, values_U - groups.spread(mean_E))
        total_U = total_U + share * centred_U / groups.spread(groups.std(values_U) + std_eps)
    summed = samples.over_tokens(total_U)
    return AdvantageOutput(whiten(summed.advantages_T, inputs.mask_T, inputs.all_reduce))


def _parts(columns: Mapping[str, Tensor], wanted: Sequence[str] | None) -> list[Tensor]:
    if wanted is None:
        return [values for name, values in columns.items() if name.startswith(PREFIX)]
    missing = [name for name in wanted if PREFIX + name not in columns]
    if missing:
        raise ValueError(f"gdpo parts {missing} are no columns; declare rollout.columns: [{PREFIX}{missing[0]}]")
    return [columns[PREFIX + name] for name in wanted]
