"""Select the parameters that weight decay acts on: matrices, but no scales or biases, and embeddings as configured.

Decay pulls towards 0. That regularises a matrix; a norm's scale is not neutral there and a bias has nothing to
regularise, so both are left out, as in minGPT, Megatron-LM and transformers' Trainer. Shape and name decide; they are
the same for a sharded module and for a stage of a pipeline. Parameters without decay are

- those with at most one dimension: norms, biases, the per-channel parameters of recurrent layers,
- those called a bias (the biases of a layer of experts are a matrix),
- those of a norm (Cohere's have one row per head),
- those that the caller names, such as `embedding_names`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import nn

NamedParameter = tuple[str, nn.Parameter]


class DecayGroups(NamedTuple):
    """Parameters with and without weight decay, with their names, in the order given."""

    decayed: list[NamedParameter]
    undecayed: list[NamedParameter]

    def with_decay(self, weight_decay: float) -> list[tuple[list[NamedParameter], float]]:
        """Return the groups that are not empty, each with its weight decay."""
        groups = [(self.decayed, weight_decay), (self.undecayed, 0.0)]
        return [(parameters, decay) for parameters, decay in groups if parameters]


def decay_groups(named_parameters: Iterable[NamedParameter], undecayed: Collection[str] = ()) -> DecayGroups:
    """Sort parameters by whether weight decay acts on them.

        groups = decay_groups(model.named_parameters()).with_decay(0.1)
        AdamW([{"params": [p for _, p in named], "weight_decay": decay} for named, decay in groups])

    Args:
        undecayed: names of further parameters without weight decay.
    """
    groups = DecayGroups([], [])
    for name, parameter in named_parameters:
        decays = name not in undecayed and _is_weight_matrix(name, parameter)
        (groups.decayed if decays else groups.undecayed).append((name, parameter))
    return groups


def embedding_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the embeddings' weights in `module.named_parameters()`; a tied weight is the head's too."""
    return frozenset(
        f"{path}.weight" if path else "weight"
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding)
    )


def _is_weight_matrix(name: str, parameter: nn.Parameter) -> bool:
    *owners, own = name.lower().split(".")
    owner = owners[-1] if owners else ""
    return parameter.ndim > 1 and "bias" not in own and "norm" not in owner and "norm" not in own
