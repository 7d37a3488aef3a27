"""Cut a model's layers over tensor-parallel ranks, by the plan that transformers ships with the model.

Parameters become DTensors, so that sharded data parallelism, the optimizer and checkpoints know what each rank has. The
arithmetic is done on their local parts, with collectives that have a gradient: DTensor's own dispatch costs several
times a small layer's arithmetic, and is not cached for ragged shapes. *Every* parameter becomes a DTensor, also
those that stay whole on all ranks: clipping and the optimizer then handle a single kind.

    colwise                          output features cut; input whole, output a slice
    rowwise                          input features cut; input a slice, output whole
    colwise_gather_output            as colwise; the output is gathered, since the next step does not work on slices
    rowwise_split_input              as rowwise, on an input that is whole
    embedding_rowwise                vocabulary cut
    replicated_with_grad_allreduce   whole, but each rank sees its own heads only: gradients are summed
    ep_dispatch_experts              experts dealt to the ranks (`_deal_experts`)
    (not in the plan)                whole, computed alike on all ranks

The output embedding is cut by vocabulary and its logits stay slices (`stage.sliced_logprobs`). Keys and values of fewer
heads than ranks stay whole; each rank takes the heads that its queries attend to. Experts are never cut: each
tensor-parallel rank has some of a layer's whole (expert parallelism), which keeps matrices large and their places in a
parameter boxes.

Collectives
-----------
They run between the tensor-parallel or the context-parallel ranks of one layer. Shoeybi et al., "Megatron-LM" (2019),
section 3, calls `enter` and `leave` f and g. A tensor that is whole on all ranks is computed identically on each of
them, and so is its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.models.transformers_internals import EXPERTS_MODULE, text_part

Group = dist.ProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return _all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return _gathered(slice_, widths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(grad, ctx.widths, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return _own_slice(whole, widths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.widths, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def enter(whole: Tensor, group: Group) -> Tensor:
    """Pass a tensor that is whole on all ranks into a sliced computation; its gradient is summed over the ranks."""
    return _apply(_Enter, whole, group)


def leave(part: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks of the partial results of a sliced computation."""
    return _apply(_Leave, part, group)


def gather(slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Concatenate slices of the last dimension, `widths` by rank, for a computation that all ranks do identically."""
    return _apply(_Gather, slice_, widths, group)


def split(whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Return this rank's slice of the last dimension of a tensor that all ranks hold; the inverse of `gather`."""
    return _apply(_Split, whole, widths, group)


def exchange(parts: Tensor, group: Group) -> Tensor:
    """All-to-all with one part per rank: parts[i] goes to rank i of the group; result[i] comes from rank i."""
    return _apply(_Exchange, parts, group)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _exchanged(parts: Tensor, group: Group) -> Tensor:
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived


def _all_reduced(tensor: Tensor, group: Group) -> Tensor:
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _own_slice(whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    rank = dist.get_rank(group)
    start = sum(widths[:rank])
    return whole[..., start : start + widths[rank]].contiguous()


def _gathered(slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Gather slices that may differ in width: gloo gathers equal shapes only, so narrow slices are padded."""
    widest = max(widths)
    own = torch.nn.functional.pad(slice_, (0, widest - slice_.shape[-1])).contiguous()
    parts = [torch.empty_like(own) for _ in widths]
    dist.all_gather(parts, own, group=group)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


Forward = Callable[..., Tensor]


class LayoutError(ValueError):
    """This engine cannot spread the model over ranks in the requested layout."""


def cut_layers(model: PreTrainedModel, plan: dict[str, str], config: PretrainedConfig, mesh: DeviceMesh) -> None:
    """Make every parameter of `model` (on any device) a DTensor on `mesh`, and its layers compute on their parts.

    Args:
        plan: style by module name, `*` for any layer number, as `PreTrainedModel.tp_plan` and `ep_plan` have it.

    Raises:
        LayoutError: the plan has a style, or is for a kind of module, that is not known here; or it names no layer.
    """
    name = type(model).__name__
    if not any("*" in pattern for pattern in plan):
        raise LayoutError(f"transformers has no tensor-parallel plan for {name}; use d or p in trainer.parallel")
    heads = _Heads(config, mesh.size())
    styles = _with_adapters({path: _style_of(path, plan) for path, _ in model.named_modules()})
    for path, module in list(model.named_modules()):
        style = styles[path]
        if heads.replicated and style == "colwise" and re.search(r"\.[kv]_proj(\.|$)", path):
            _repeat_heads(module, heads, mesh)
            continue
        if style is not None and style not in _STYLES:
            raise LayoutError(f"{name} wants the tensor-parallel style {style!r} at {path}, which is not supported")
        _STYLES[style or "whole"](module, mesh)
    if heads.replicated:
        for module in text_part(model).modules():
            if hasattr(module, "num_key_value_groups"):  # for eager attention; the other kinds use the shapes
                module.num_key_value_groups = cast(Any, max(1, heads.queries // heads.ranks))


def cut_output_embedding(head: nn.Module, mesh: DeviceMesh, linear: Forward) -> None:
    """Cut the map from hidden states to logits by vocabulary; its logits are then this rank's slice.

    Args:
        linear: `F.linear`, or another function of states, weight and bias.
    """
    _column(head, mesh, linear)


def keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of `module` DTensors that are whole on all ranks; all ranks compute the same."""
    _keep_whole(module, mesh, Replicate())


def _style_of(path: str, plan: dict[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _with_adapters(styles: dict[str, str | None]) -> dict[str, str | None]:
    """Apply the style of a layer with an adapter to its parts: the adapter's output is cut like the layer's."""
    cut = dict(styles)
    for path, style in styles.items():
        if style is None or f"{path}.lora_A" not in styles:
            continue
        cut[path], cut[f"{path}.base_layer"] = None, style
        if style == "colwise":
            cut[f"{path}.lora_B.default"] = style
        if style == "rowwise":
            cut[f"{path}.lora_A.default"] = style
    return cut


class _Heads:
    """Numbers of attention heads, and whether keys and values have too few to be cut."""

    def __init__(self, config: PretrainedConfig, ranks: int) -> None:
        self.ranks = ranks
        self.queries: int = config.num_attention_heads
        self.keys: int = getattr(config, "num_key_value_heads", None) or self.queries
        if self.queries % ranks:
            raise LayoutError(f"{self.queries} query heads cannot be cut into {ranks} slices; lower t")
        if self.keys % ranks and ranks % self.keys:
            raise LayoutError(f"{self.keys} key-value heads and {ranks} slices: neither divides the other; lower t")
        self.replicated = bool(self.keys % ranks)

    def of_rank(self, rank: int) -> int:
        """Return the key-value head that the queries of `rank` attend to."""
        return rank * self.keys // self.ranks


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = module._parameters[name]
    if parameter is not None and not isinstance(parameter, DTensor):
        made = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)


def _local(module: nn.Module, name: str, grad: Placement | None = None) -> Tensor | None:
    parameter = module._parameters.get(name)
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=None if grad is None else [grad])


def _widths(size: int, mesh: DeviceMesh) -> tuple[int, ...]:
    """Widths by rank of `size` features cut as `Shard` cuts them."""
    step = -(-size // mesh.size())
    return tuple(max(0, min(step, size - rank * step)) for rank in range(mesh.size()))


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise LayoutError(f"{type(module).__name__} is not a linear layer, so it cannot be cut; use d or p")
    return module


def _column(module: nn.Module, mesh: DeviceMesh, product: Forward = F.linear) -> None:
    linear, group = _linear(module), mesh.get_group()
    for name in ("weight", "bias"):
        _distribute(linear, name, mesh, Shard(0))

    def forward(x: Tensor) -> Tensor:
        return product(enter(x, group), cast(Tensor, _local(linear, "weight")), _local(linear, "bias"))

    _replace_forward(linear, forward)


def _column_gathered(module: nn.Module, mesh: DeviceMesh) -> None:
    _column(module, mesh)
    widths, group = _widths(_linear(module).out_features, mesh), mesh.get_group()
    forward = cast(Forward, module.forward)
    _replace_forward(module, lambda x: gather(forward(x), widths, group))


def _row(module: nn.Module, mesh: DeviceMesh) -> None:
    linear, group = _linear(module), mesh.get_group()
    _distribute(linear, "weight", mesh, Shard(1))
    _distribute(linear, "bias", mesh, Replicate())

    def forward(x: Tensor) -> Tensor:
        whole = leave(F.linear(x, cast(Tensor, _local(linear, "weight"))), group)
        bias = _local(linear, "bias", Replicate())
        return whole if bias is None else whole + bias

    _replace_forward(linear, forward)


def _row_split(module: nn.Module, mesh: DeviceMesh) -> None:
    _row(module, mesh)
    widths, group = _widths(_linear(module).in_features, mesh), mesh.get_group()
    forward = cast(Forward, module.forward)
    _replace_forward(module, lambda x: forward(split(x, widths, group)))


def _embedding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut an embedding by vocabulary. Models' own classes (scaled embeddings) work on a slice as on the whole."""
    if not isinstance(module, nn.Embedding):
        raise LayoutError(f"{type(module).__name__} is not an embedding, so it cannot be cut; use d or p")
    group, widths = mesh.get_group(), _widths(module.num_embeddings, mesh)
    start, width = sum(widths[: mesh.get_local_rank()]), widths[mesh.get_local_rank()]
    _distribute(module, "weight", mesh, Shard(0))
    original = cast(Forward, module.forward)
    padding = module.padding_idx  # the padding token's row gets no gradient
    module.padding_idx = padding - start if padding is not None and 0 <= padding - start < width else None

    def forward(ids: Tensor) -> Tensor:
        local = ids - start
        mine = (local >= 0) & (local < width)
        if width == 0:
            rows = torch.zeros(*ids.shape, module.embedding_dim, dtype=module.weight.dtype, device=ids.device)
        else:
            with local_parameters(module, None):
                rows = original(torch.where(mine, local, 0))
        return leave(torch.where(mine[..., None], rows, 0), group)

    _replace_forward(module, forward)


def _whole_of_own_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    _keep_whole(module, mesh, Partial())


def _keep_whole(module: nn.Module, mesh: DeviceMesh, grad: Placement) -> None:
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if not names:
        return
    for name in names:
        _distribute(module, name, mesh, Replicate())
    original = cast(Forward, module.forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with local_parameters(module, grad):
            return original(*args, **kwargs)

    _replace_forward(module, forward)


def _deal_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank a contiguous run of the experts. The rank computes their contribution to every token.

    The module is called with hidden states [T, H], and the chosen experts and their weights of each token, [T, k] each.
    Only pairs of a token and an expert of this rank are computed, each as a separate token with one expert.
    """
    total, group = int(cast(Any, module).num_experts), mesh.get_group()
    if total % mesh.size():
        raise LayoutError(f"{total} experts cannot be dealt to {mesh.size()} ranks; lower t")
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.shape[0] != total:
            raise LayoutError(f"{type(module).__name__}.{name} is not by expert, so it cannot be dealt; use d or p")
        _distribute(module, name, mesh, Shard(0))
    count = total // mesh.size()
    first = mesh.get_local_rank() * count
    module.num_experts = cast(Any, count)
    original = cast(Forward, module.forward)

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        hidden_TH, weights_TK = enter(hidden_TH, group), enter(weights_TK, group)
        tokens, choices = chosen_TK.shape
        local_P = chosen_TK.flatten() - first
        mine_P = (local_P >= 0) & (local_P < count)
        pairs_M = mine_P.nonzero()[:, 0]
        if len(pairs_M) == 0:  # a pair that adds nothing, so that every rank has a gradient for every parameter
            pairs_M = pairs_M.new_zeros(1)
        expert_M = torch.where(mine_P, local_P, 0)[pairs_M]
        weight_M = torch.where(mine_P, weights_TK.flatten(), 0.0)[pairs_M]
        with local_parameters(module, None):
            out_MH = original(hidden_TH[pairs_M // choices], expert_M[:, None], weight_M[:, None])
        out_PH = out_MH.new_zeros(tokens * choices, out_MH.shape[-1]).index_copy(0, pairs_M, out_MH)
        return leave(out_PH.view(tokens, choices, -1).sum(1), group)

    _replace_forward(module, forward)


def _repeat_heads(module: nn.Module, heads: _Heads, mesh: DeviceMesh) -> None:
    """Keep the weights of keys or values whole if they have fewer heads than ranks; a rank takes its head of the
    output.
    """
    linear, group = _linear(module), mesh.get_group()
    _keep_whole(linear, mesh, Partial())
    whole = cast(Forward, linear.forward)
    size = linear.out_features // heads.keys
    start = heads.of_rank(mesh.get_local_rank()) * size
    _replace_forward(linear, lambda x: whole(enter(x, group))[..., start : start + size])


@contextmanager
def local_parameters(module: nn.Module, grad: Placement | None) -> Iterator[None]:
    """Within this block the module's own parameters are plain local tensors, for a forward that cannot use DTensors."""
    saved = dict(module._parameters)
    try:
        for name in saved:
            module._parameters[name] = cast(Any, _local(module, name, grad))
        yield
    finally:
        module._parameters.update(saved)


def _replace_forward(module: nn.Module, forward: Forward) -> None:
    module.forward = forward


_STYLES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "colwise": _column,
    "rowwise": _row,
    "colwise_gather_output": _column_gathered,
    "rowwise_split_input": _row_split,
    "embedding_rowwise": _embedding,
    "replicated_with_grad_allreduce": _whole_of_own_heads,
    EXPERTS_MODULE: _deal_experts,
    "whole": keep_whole,
}
