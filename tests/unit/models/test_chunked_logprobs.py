"""Log-probabilities and entropies from hidden states: values, gradients and memory of the chunked form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.models import chunked_logprobs
from asyncrl.models.chunked_logprobs import EntropyMode, token_logprobs

N, H, V = 23, 8, 50
Scored = tuple[Tensor, Tensor | None]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    hidden_NH = torch.randn(N, H).to(dtype).requires_grad_()
    return hidden_NH, torch.randint(0, V, (N,)), nn.Linear(H, V).to(dtype)


def plain(hidden_NH: Tensor, targets_N: Tensor, head: nn.Module, temperature: float, entropy: EntropyMode) -> Scored:
    """The same by autograd, whole and in fp64."""
    all_NV = (head(hidden_NH).double() / temperature).log_softmax(-1)
    logprobs_N = all_NV.gather(-1, targets_N[:, None])[:, 0]
    if entropy == EntropyMode.none:
        return logprobs_N, None
    entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    return logprobs_N, entropy_N if entropy == EntropyMode.differentiable else entropy_N.detach()


def results(scored: Scored, hidden_NH: Tensor, head: nn.Linear) -> list[Tensor]:
    """Values, and gradients of a loss that weighs every token differently."""
    logprobs_N, entropy_N = scored
    weights_N = torch.linspace(-1, 2, N)
    total = (logprobs_N * weights_N).sum()
    values = [logprobs_N.detach()]
    if entropy_N is not None:
        total = total + (entropy_N * weights_N.flip(0).square()).sum()
        values.append(entropy_N.detach())
    return [*values, *torch.autograd.grad(total, [hidden_NH, head.weight, head.bias])]


@pytest.mark.parametrize("block", [1, 3 * V, 1 << 22])
def test_a_chunk_in_blocks_gives_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_NH, targets_N, head = inputs()
    expected = results(plain(hidden_NH, targets_N, head, 0.7, EntropyMode.differentiable), hidden_NH, head)
    monkeypatch.setattr(chunked_logprobs, "_BLOCK", block)
    scored = token_logprobs(hidden_NH, targets_N, head, temperature=0.7, entropy=EntropyMode.differentiable)
    for got, wanted in zip(results(scored, hidden_NH, head), expected, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_restricted_logits_score_as_a_vocabulary_of_the_allowed_tokens_alone(dtype: torch.dtype) -> None:
    hidden_NH, _, head = inputs(dtype)
    allowed_A = torch.tensor([3, 7, 8, 40])
    indices_N = torch.randint(0, 4, (N,))
    small = nn.Linear(H, 4).to(dtype)
    with torch.no_grad():
        small.weight.copy_(head.weight[allowed_A])
        small.bias.copy_(head.bias[allowed_A])
    expected = results(plain(hidden_NH, indices_N, small, 0.7, EntropyMode.differentiable), hidden_NH, small)
    scored = token_logprobs(
        hidden_NH,
        allowed_A[indices_N],
        lambda hidden: chunked_logprobs.restricted(head(hidden), allowed_A),
        temperature=0.7,
        entropy=EntropyMode.differentiable,
    )
    *same, weight_VH, bias_V = results(scored, hidden_NH, head)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    others_V = ~torch.isin(torch.arange(V), allowed_A)
    assert not weight_VH[others_V].any()
    for got, wanted in zip([*same, weight_VH[allowed_A], bias_V[allowed_A]], expected, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), **close)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("limit", [1, 4 * V * 7, 1 << 20], ids=["a token a chunk", "chunks of 7", "one chunk"])
@pytest.mark.parametrize("entropy", EntropyMode)
def test_values_and_gradients_are_those_of_the_plain_form(entropy: EntropyMode, limit: int, temperature: float) -> None:
    hidden_NH, targets_N, head = inputs()
    expected = results(plain(hidden_NH, targets_N, head, temperature, entropy), hidden_NH, head)
    scored = token_logprobs(
        hidden_NH, targets_N, head, temperature=temperature, entropy=entropy, max_logits_bytes=limit
    )
    for got, wanted in zip(results(scored, hidden_NH, head), expected, strict=True):
        assert got.dtype == torch.float32
        scale = wanted.abs().max().float().clamp(min=1.0)
        torch.testing.assert_close(got / scale, wanted.float() / scale, rtol=0, atol=1e-6)


@pytest.mark.parametrize("limit", [4 * V * 7, 1 << 20])
def test_bfloat16_logits_are_scored_in_fp32(limit: int) -> None:
    hidden_NH, targets_N, head = inputs(torch.bfloat16)
    expected = results(plain(hidden_NH, targets_N, head, 0.7, EntropyMode.differentiable), hidden_NH, head)
    scored = token_logprobs(
        hidden_NH,
        targets_N,
        head,
        temperature=0.7,
        entropy=EntropyMode.differentiable,
        max_logits_bytes=limit,
    )
    got = results(scored, hidden_NH, head)
    for value, wanted in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, wanted.float(), rtol=0, atol=2e-6)
    for gradient, wanted in zip(got[2:], expected[2:], strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), wanted.double(), rtol=0.05, atol=0.05)


def test_entropies_for_statistics_carry_no_gradient() -> None:
    hidden_NH, targets_N, head = inputs()
    _, entropy_N = token_logprobs(hidden_NH, targets_N, head, entropy=EntropyMode.constant)
    assert entropy_N is not None
    assert not entropy_N.requires_grad
    assert token_logprobs(hidden_NH, targets_N, head)[1] is None


def test_no_tokens_give_no_scores_and_a_gradient_of_zero() -> None:
    hidden_NH, targets_N, head = inputs()
    logprobs_N, entropy_N = token_logprobs(hidden_NH[:0], targets_N[:0], head, entropy=EntropyMode.constant)
    assert entropy_N is not None
    assert logprobs_N.shape == entropy_N.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs_N.sum(), hidden_NH)
    assert not gradient.any()


def test_a_second_backward_pass_is_refused_not_wrong() -> None:
    """The gradient is written over what the first one needed."""
    hidden_NH, targets_N, head = inputs()
    logprobs_N, _ = token_logprobs(hidden_NH, targets_N, head)
    torch.autograd.grad(logprobs_N.sum(), hidden_NH, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprobs_N.sum(), hidden_NH)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return out


def test_no_tensor_is_larger_than_a_chunks_logits() -> None:
    torch.manual_seed(0)
    tokens, vocabulary = 400, 300
    hidden_NH, targets_N = torch.randn(tokens, 2, requires_grad=True), torch.randint(0, vocabulary, (tokens,))
    head = nn.Linear(2, vocabulary, bias=False)
    with _Largest() as seen:
        logprobs_N, entropy_N = token_logprobs(
            hidden_NH, targets_N, head, temperature=0.7, entropy=EntropyMode.differentiable, max_logits_bytes=10_000
        )
        assert entropy_N is not None
        torch.autograd.grad((logprobs_N + entropy_N).sum(), [hidden_NH, head.weight])
    assert 0 < seen.elements <= 10_000 // 4
