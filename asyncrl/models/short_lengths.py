"""A copy of a model with short lengths in its config, so that short sequences reach beyond them.

Examples are a sliding window of 4,096 tokens, a chunk of 8,192, or the 2,048 best keys of an index. They have no effect
on the short sequences of the parity check (`asyncrl.models.parity`). So an engine is checked a second time, on a copy
of the model whose config has `SHORT` instead of these lengths, with the same weights.

No list of names would cover all fields that are lengths. A field counts as a length if lowering it keeps the shapes of
the parameters, unlike a size, and the copy still computes. Other factors that pass this test do no harm: the copy is an
ordinary model, and an engine must compute it as transformers does.

Tables of positions are the other kind of length: a row of several sequences, end to end, may be longer than the table.
If parameters or buffers have an entry for each position, the copy has just enough for the parity check's sequences.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.models.transformers_internals import attention, context_limit, new_model

SHORT = 8
"""The lowered lengths: below most of the parity check's sequences, and a power of two, as blocks must be.
"""
_NO_LENGTH = re.compile(r"^(num|n)_|_ids?$|_dim$|intermediate_size|^original_max_position_embeddings$")
"""Names of counts, tokens and widths, and of the fields that `batch_independent_limit` reads."""
_POSITIONS = "max_position_embeddings"


class ShortModel(NamedTuple):
    """A copy of a model with short lengths.

    Attributes:
        model: shares the memory of the original's parameters, and has the first entries of tables of positions.
        lengths: the lowered fields of the config, with the original values.
    """

    model: PreTrainedModel
    lengths: Mapping[str, int]


def spoken(lengths: Mapping[str, int]) -> str:
    """Return the lengths as text for a message."""
    return " and ".join(f"{name}={value}" for name, value in lengths.items())


def short_model(model: PreTrainedModel, weights: Mapping[str, Tensor], reach: int, fitting: int) -> ShortModel | None:
    """Return a copy of `model` in which every length up to `reach` is lowered; None if there is no such length.

    Args:
        weights: the parameters, by their names in a new model.
        reach: number of tokens of the run's longest row.
        fitting: number of tokens of the longest sequence that the copy must compute.
    """
    shapes = _Shapes.of(_skeleton(model, model.config))
    found, lengths = None, {}
    for name, value in sorted(_lengths(model.config, reach).items()):
        config = copy.deepcopy(model.config if found is None else found.config)
        _lower(config, name, reach)
        made = _computing(model, config, weights, fitting, shapes, tables=False)
        if made is not None:
            found, lengths[name] = made, value
    limit = context_limit(model.config)
    if limit is not None and fitting < limit <= reach:
        config = copy.deepcopy(model.config if found is None else found.config)
        setattr(config.get_text_config(), _POSITIONS, fitting)
        made = _computing(model, config, weights, fitting, shapes, tables=True)
        if made is not None:
            found, lengths[_POSITIONS] = made, limit
    return None if found is None else ShortModel(found, lengths)


class _Shapes(NamedTuple):
    parameters: dict[str, torch.Size]
    buffers: dict[str, torch.Size]

    @classmethod
    def of(cls, model: nn.Module) -> _Shapes:
        return cls({n: p.shape for n, p in model.named_parameters()}, {n: b.shape for n, b in model.named_buffers()})


def _computing(
    model: PreTrainedModel,
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    fitting: int,
    shapes: _Shapes,
    *,
    tables: bool,
) -> PreTrainedModel | None:
    """Return `model` with another `config`, with the same shapes or others (`tables`); None if that is impossible."""
    try:
        made = _skeleton(model, config)
        if _Shapes.of(made) == shapes if tables else _Shapes.of(made).parameters != shapes.parameters:
            return None
        _take_weights(made, model, weights)
        with torch.no_grad(), attention(made, "eager"):
            made(input_ids=torch.zeros(1, fitting, dtype=torch.long, device=model.device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the field is a size: a model's own code may raise any error
        return None
    return made


def _skeleton(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of the class of `model` with buffers but without memory for parameters."""
    with torch.device("meta"):
        made = new_model(type(model), copy.deepcopy(config), model.dtype)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in made.parameters():
        setattr(parameter, "_is_hf_initialized", True)  # noqa: B010 - or transformers would draw values
    with torch.random.fork_rng(devices=[]):
        made.initialize_weights()  # type: ignore[no-untyped-call]  # computes the buffers
    return made


def _take_weights(made: nn.Module, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the parameters of `made` by `weights`, and its buffers by the saved buffers of `model`."""
    buffers = dict(model.named_buffers())
    device = next(iter(weights.values())).device
    for prefix, module in made.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first = weights[path + name][tuple(slice(size) for size in parameter.shape)]
                module._parameters[name] = nn.Parameter(first.detach(), requires_grad=False)
        for name, buffer in module._buffers.items():
            saved = None if name in module._non_persistent_buffers_set else buffers.get(path + name)
            if buffer is not None:
                same = saved is not None and saved.shape == buffer.shape
                module._buffers[name] = saved if same else buffer.to(device)


def _lengths(config: PretrainedConfig, reach: int) -> dict[str, int]:
    """Return the fields that may be lengths, and their largest values."""
    positions = {_POSITIONS, config.get_text_config().attribute_map.get(_POSITIONS)}
    found: dict[str, int] = {}
    for fields in _records(config.get_text_config()):
        for name, value in fields.items():
            lowered = [each for each in _numbers(value) if SHORT < each <= reach]
            if lowered and name not in positions and not _NO_LENGTH.search(name):
                found[name] = max(*lowered, found.get(name, 0))
    return found


def _lower(config: PretrainedConfig, name: str, reach: int) -> None:
    """Lower the field `name` wherever it is in `config`."""

    def low(value: Any) -> Any:
        return SHORT if type(value) is int and SHORT < value <= reach else value

    for fields in _records(config.get_text_config()):
        if name in fields:
            value = fields[name]
            fields[name] = [low(each) for each in value] if isinstance(value, list) else low(value)


def _records(fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a config, and those of the configs and dictionaries in it."""
    own = vars(fields) if isinstance(fields, PretrainedConfig) else fields
    yield own
    for value in list(own.values()):
        if isinstance(value, (PretrainedConfig, dict)):
            yield from _records(value)


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int]
