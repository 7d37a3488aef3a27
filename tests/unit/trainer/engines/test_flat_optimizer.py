"""AdamW over one flat vector is torch's AdamW, parameter by parameter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.trainer.engines.flat import FlatOptimizer
from asyncrl.trainer.settings import OptimizerConfig, OptimizerName

CONFIG = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5)
RATES = [0.0, 5e-3, 1e-2, 8e-3, 5e-3, 1e-3]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(9, 5, generator=generator).to(dtype) for _ in range(steps)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    return output.float().square().mean() * 10


def train(
    model: nn.Module, optimizer: FlatOptimizer, xs: list[torch.Tensor], rates: Sequence[float] = RATES
) -> list[float]:
    norms = []
    for x, lr in zip(xs, rates, strict=False):
        optimizer.zero_grad()
        for part in x.split(4):  # gradients add up over micro-batches
            torch.autograd.backward(loss_of(model, part) * len(part) / len(x))
        norms.append(optimizer.step(lr).grad_norm)
    return norms


def restore(optimizer: FlatOptimizer, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """As a checkpoint does: into the tensors of the state, then `load_state`."""
    for name, tensor in optimizer.state()[0].items():
        tensor.copy_(tensors[name])
    optimizer.load_state(meta)


def test_it_takes_the_steps_of_torch_adamw_with_clipping_and_the_rates_it_is_given() -> None:
    mine, theirs = network(), network()
    optimizer = FlatOptimizer(mine.named_parameters(), CONFIG)
    norms = train(mine, optimizer, batches(6))
    reference = torch.optim.AdamW(
        [
            {"params": [theirs[0].weight, theirs[2].weight], "weight_decay": 0.1},
            {"params": [theirs[0].bias, theirs[2].bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    for step, x in enumerate(batches(6)):
        for group in reference.param_groups:
            group["lr"] = RATES[step]
        reference.zero_grad()
        torch.autograd.backward(loss_of(theirs, x))
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert norms[step] == pytest.approx(float(norm), rel=1e-4)
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("muon_lr", [None, 2e-2])
def test_muon_moves_the_named_matrices_as_torch_does_and_adamw_the_rest(muon_lr: float | None) -> None:
    mine, theirs = network(), network()
    config = OptimizerConfig(name=OptimizerName.muon, lr=1e-2, muon_lr=muon_lr, weight_decay=0.1, max_grad_norm=0.5)
    optimizer = FlatOptimizer(mine.named_parameters(), config, matrices=["0.weight"])
    train(mine, optimizer, batches(6))
    references = [
        torch.optim.Muon([theirs[0].weight], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs[2].weight], betas=(0.9, 0.99), weight_decay=0.1),
        torch.optim.AdamW([theirs[0].bias, theirs[2].bias], betas=(0.9, 0.99), weight_decay=0.0),
    ]
    for lr, x in zip(RATES, batches(6), strict=True):
        theirs.zero_grad()
        torch.autograd.backward(loss_of(theirs, x))
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for reference, factor in zip(references, (1.0 if muon_lr is None else 2.0, 1.0, 1.0), strict=True):
            reference.param_groups[0]["lr"] = lr * factor
            reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_parameters_and_gradients_are_views_of_the_flat_vectors() -> None:
    model = network()
    optimizer = FlatOptimizer(model.named_parameters(), CONFIG)
    torch.autograd.backward(loss_of(model, batches(1)[0]))
    in_order = (model[0].weight, model[2].weight, model[0].bias, model[2].bias)  # what decays lies first
    gradients = torch.cat([parameter.grad.flatten() for parameter in in_order])
    assert torch.equal(gradients, optimizer.grad)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: master.shape for name, master in optimizer.masters().items()} == shapes
    assert gradients.abs().sum() > 0
    optimizer.flat.data.zero_()
    assert all(parameter.abs().sum() == 0 for parameter in model.parameters())


def test_bfloat16_parameters_follow_fp32_masters() -> None:
    config = OptimizerConfig(max_grad_norm=0.0)
    model = network(torch.bfloat16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = FlatOptimizer(model.named_parameters(), config)
    train(model, optimizer, batches(100, torch.bfloat16), [1e-5] * 100)  # each far below bf16's resolution
    masters = optimizer.masters()
    assert all(parameter.grad is None for parameter in model.parameters())
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        master = masters[name]
        assert torch.equal(parameter, master.to(torch.bfloat16))
        assert (master - old.float()).abs().max() > 1e-4  # a hundred small steps add up


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = network()
    optimizer = FlatOptimizer(model.named_parameters(), CONFIG)
    train(model, optimizer, batches(1))
    before = optimizer.flat.detach().clone()
    optimizer.grad[3] = bad
    outcome = optimizer.step(1e-2)
    assert not outcome.applied
    assert torch.equal(optimizer.flat, before)
    assert optimizer.steps == 1


@pytest.mark.parametrize("matrices", [(), ("2.weight",)], ids=["adamw", "muon"])
def test_its_state_continues_bitwise_through_json_and_tensors(matrices: Sequence[str]) -> None:
    xs = batches(4)
    straight, stopped, resumed = network(), network(), network()
    train(straight, FlatOptimizer(straight.named_parameters(), CONFIG, matrices=matrices), xs)
    first = FlatOptimizer(stopped.named_parameters(), CONFIG, matrices=matrices)
    train(stopped, first, xs[:2])
    tensors, meta = first.state()
    second = FlatOptimizer(resumed.named_parameters(), CONFIG, matrices=matrices)
    restore(second, tensors, json.loads(json.dumps(meta)))
    train(resumed, second, xs[2:], RATES[2:])
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_its_state_is_its_storage_by_parameter() -> None:
    model = network()
    optimizer = FlatOptimizer(model.named_parameters(), CONFIG)
    tensors, meta = optimizer.state()
    names = [name for name, _ in model.named_parameters()]
    assert set(tensors) == {f"{kind}.{name}" for kind in ("weights", "exp_avg", "exp_avg_sq") for name in names}
    assert meta == {"step": 0}
    train(model, optimizer, batches(1), [1e-2])
    assert all(tensor.abs().sum() > 0 for tensor in tensors.values())  # they moved with the step
    assert torch.equal(tensors["weights.2.bias"], model[2].bias)
    assert optimizer.state()[1] == {"step": 1}


def test_a_model_without_parameters_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatOptimizer(nn.Linear(2, 2).requires_grad_(False).named_parameters(), CONFIG)
