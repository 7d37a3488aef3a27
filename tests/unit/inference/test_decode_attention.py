"""Attention of one new token per row: exact where values have 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncrl.inference.embedded.attention import slot_decode_attention

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 64, 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_output_is_rounded(dtype: torch.dtype) -> None:
    """Scores about 80 apart would be off by 0.25 in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(3, heads, length, DIM, generator=generator)).to(dtype)

    query, key, value = drawn(HEADS, 1, 5.0), drawn(KV_HEADS, LENGTH, 5.0), drawn(KV_HEADS, LENGTH, 1.0)
    exact = nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True)
    found, _ = slot_decode_attention(nn.Module(), query, key, value, None)
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found[:, 0], exact[:, :, 0].to(dtype), rtol=2 * rounding, atol=2 * rounding)


def test_a_gpu_computes_the_scores_in_fp32() -> None:
    """Shapes and types alone: no GPU is needed for that."""
    with FakeTensorMode():
        query, key = (
            torch.empty(3, heads, length, DIM, dtype=torch.bfloat16, device="cuda")
            for heads, length in ((HEADS, 1), (KV_HEADS, LENGTH))
        )
        mask = torch.empty(3, LENGTH, dtype=torch.bfloat16, device="cuda")
        found, _ = slot_decode_attention(nn.Module(), query, key, key, mask)
    assert (found.dtype, found.shape) == (torch.bfloat16, (3, 1, HEADS, DIM))
