"""Attention of which each rank has a part of the tokens is that of one rank; what else looks along them is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.parity import UnsupportedModelError, forks, probe_sequences
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.sharded import loader
from asyncrl.trainer.engines.sharded.context_parallel import _across_ranks, cut_to_part, part_of
from asyncrl.trainer.engines.sharded.loader import select_layout
from asyncrl.trainer.model.attention import packed_attention, varlen_attention
from asyncrl.trainer.parallel.world import World

pytestmark = pytest.mark.slow

HEADS, SIZE, VALUE = 6, 4, 4
Compute = Callable[..., tuple[Tensor, None]]
CASES: dict[str, tuple[AttentionKind, Compute, int, dict[str, Any]]] = {
    "packed": (AttentionKind.packed, packed_attention, 6, {}),
    "packed, a window, fewer key heads": (AttentionKind.packed, packed_attention, 3, {"sliding_window": 4}),
    "packed, key heads that the ranks do not divide": (AttentionKind.packed, packed_attention, 2, {}),
    "shared prefixes, sinks": (AttentionKind.tree, packed_attention, 2, {"s_aux": torch.linspace(-1, 1, HEADS)}),
    "shared prefixes, capped": (AttentionKind.tree, packed_attention, 1, {"softcap": 2.0}),
    "variable lengths": (AttentionKind.packed, varlen_attention, 3, {"sliding_window": 5}),
}


def compared(ranks: Ranks) -> dict[str, tuple[float, float]]:
    """For each case, how far this rank's outputs and gradients are from those of the whole stream."""
    probes = probe_sequences(64)
    found = {}
    for name, (kind, compute, key_heads, settings) in CASES.items():
        whole = one_micro_batch([*probes, *forks(probes)], kind, torch.device("cpu"), wanted=True)
        cut = cut_to_part(whole, ranks)
        part = part_of(cut)
        assert part is not None
        assert part.tokens % 3, "parts with padding are tried"
        generator = torch.Generator().manual_seed(1)
        sizes = ((HEADS, SIZE), (key_heads, SIZE), (key_heads, VALUE))
        streams = [torch.randn(part.tokens, *each, generator=generator, dtype=torch.float64) for each in sizes]
        indices = whole.indices_I.unique()
        seen = torch.randn(len(indices), HEADS, VALUE, generator=generator, dtype=torch.float64)
        expected, gradients = attended(compute, whole, streams, settings)
        loss = (expected[0, indices] * seen).sum()
        theirs = torch.autograd.grad(loss, gradients)
        given, mine = attended(_across_ranks(compute), cut, [part.own(each) for each in streams], settings)
        wanted = part.wanted(indices)
        (given[0, wanted.indices] * seen[wanted.own_M]).sum().backward()
        own = part.own(torch.arange(part.tokens))
        own = own[: min(part.width, part.tokens - part.rank * part.width)]
        there = torch.isin(own, indices)
        outputs = (given[0, : len(own)][there] - expected[0, own[there]]).abs().sum()
        differences = [each.grad[: len(own)] - its[own] for each, its in zip(mine, theirs, strict=True)]
        found[name] = float(outputs), max(float(each.abs().max()) for each in differences)
    return found


def attended(
    compute: Compute, micro_batch: MicroBatch, streams: list[Tensor], settings: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs [1, tokens, heads, size], and the leaves they are computed of: [tokens, heads, size] each."""
    leaves = [each.clone().requires_grad_() for each in streams]
    inputs = {name: value for name, value in micro_batch.model_inputs.items() if name != "position_ids"}
    out, _ = compute(nn.Module(), *(each.transpose(0, 1)[None] for each in leaves), None, **inputs, **settings)
    return out, leaves


def test_attention_in_parts_is_that_of_the_whole_stream(config: ExperimentConfig, on_ranks: Any) -> None:
    """Outputs and gradients of every kernel, in double precision, with masks of windows and of shared prefixes."""
    config.trainer.parallel = "c3"
    for found in on_ranks(config, lambda world: compared(world.position("actor").context)):
        assert found.keys() == CASES.keys()
        for name, (outputs, gradients) in found.items():
            assert max(outputs, gradients) < 1e-12, (name, outputs, gradients)


def look_back(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """Add half of the hidden state of the token before, if there is one in the sequence: a short convolution."""
    hidden, *others = args
    before = F.pad(hidden[:, :-1], (0, 0, 1, 0))
    return (hidden + 0.5 * before * (kwargs["position_ids"] > 0)[..., None], *others), kwargs


@pytest.mark.parametrize(
    ("layout", "convolves", "message"),
    [
        ("c2", True, r"in 2 parts \(c2 in trainer.parallel\): 8 sequences computed together differ .* Use c1, or"),
        ("c3", False, "2 query heads cannot be dealt to 3 ranks"),
    ],
)
def test_a_model_that_looks_along_the_tokens_by_other_means_is_refused(
    layout: str, convolves: bool, message: str, config: ExperimentConfig, on_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is right when it is packed."""
    original = loader._surrogate

    def surrogate(*args: Any) -> Any:
        model = original(*args)
        if convolves:
            model.model.layers[0].register_forward_pre_hook(look_back, with_kwargs=True)
        return model

    monkeypatch.setattr(loader, "_surrogate", surrogate)

    def settle(world: World) -> str:
        position, path = world.position("actor"), str(config.model.path)
        try:
            return str(select_layout(path, config, torch.float32, torch.device("cpu"), position))
        except UnsupportedModelError as error:
            return str(error)

    config.trainer.parallel = "d2"
    assert all(reported.startswith("packed") for reported in on_ranks(config, settle))
    config.trainer.parallel = layout
    assert all(re.search(message, reported) for reported in on_ranks(config, settle))
