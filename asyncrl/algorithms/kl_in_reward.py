"""The KL penalty as part of the reward."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_token_rewards(kl_T: Tensor, mask_T: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl_t at policy tokens, 0 elsewhere: the `token_rewards_T` of `AdvantageInputs`.

    Ziegler et al. 2019 (arXiv:1909.08593) eq. 2; `kl_T` from a kl estimator (k1 is unbiased here), constant.
    """
    return torch.where(mask_T, -kl_coef * kl_T.detach(), 0)
