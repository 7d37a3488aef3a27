"""The vision tower of a loaded model: the rows of pictures, computed once for each picture and version of the weights.

`get_image_features` of transformers' model makes the rows, so nothing here is specific to a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.models.host_copies import host_buffer
from asyncrl.models.pictures.picture_ids import Rows, SeenPicture
from asyncrl.models.transformers_internals import text_part


class VisionTower:
    """The vision tower and the projector of `model`.

    Attributes:
        encoded: pictures that were computed so far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._features: Callable[..., Any] = cast(Any, model.base_model).get_image_features
        self._weights = object()
        self.encoded = 0

    @property
    def input_names(self) -> Collection[str]:
        """Names of the prepared arrays that the tower takes."""
        return inspect.signature(self._features).parameters

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only make rows of pictures."""
        return tower_parameters(self._model)

    def weights_changed(self) -> None:
        """Forget the rows computed so far."""
        self._weights = object()

    def rows(self, pictures: Sequence[SeenPicture], *, keep: bool) -> list[Rows]:
        """Return the rows of each picture.

        Args:
            keep: use rows that were computed since the last `weights_changed`, and keep new ones. False: compute all
                rows, with gradients if gradients are recorded.
        """
        if not keep:
            return self._encode(pictures)
        missing = [seen for seen in pictures if seen.kept is None or seen.kept[0] is not self._weights]
        if missing:
            with torch.no_grad():
                for seen, rows in zip(missing, self._encode(missing), strict=True):
                    seen.kept = (self._weights, rows)
        return [cast(tuple[object, Rows], seen.kept)[1] for seen in pictures]

    def _encode(self, pictures: Sequence[SeenPicture]) -> list[Rows]:
        """Return rows of each picture, by the vision tower; pictures of one shape are computed together."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, seen in enumerate(pictures):
            shape = tuple((name, tensor.shape[1:]) for name, tensor in sorted(seen.inputs.items()))
            alike.setdefault(shape, []).append(number)
        made: dict[int, Rows] = {}
        for numbers in alike.values():
            made |= zip(numbers, self._encode_alike([pictures[number] for number in numbers]), strict=True)
        self.encoded += len(pictures)
        return [made[number] for number in range(len(pictures))]

    def _encode_alike(self, pictures: Sequence[SeenPicture]) -> list[Rows]:
        output = self._features(**self.inputs(pictures), return_dict=True)
        embeds = _flat(output.pooler_output)
        deep = tuple(map(_flat, getattr(output, "deepstack_features", None) or ()))
        counts = [seen.rows for seen in pictures]
        if len(embeds) != sum(counts):
            raise ValueError(f"the vision tower made {len(embeds)} rows of pictures with {sum(counts)} placeholders")
        parts = (torch.split(tensor.to(self._model.dtype), counts) for tensor in (embeds, *deep))
        return [Rows(embed, tuple(layers)) for embed, *layers in zip(*parts, strict=True)]

    def inputs(self, pictures: Sequence[SeenPicture]) -> dict[str, Tensor]:
        """Return the tower's inputs for `pictures`, at least one, on its device and in its type."""
        joined = {name: self._uploaded([seen.inputs[name] for seen in pictures]) for name in pictures[0].inputs}
        return {name: each.to(self._model.dtype) if each.is_floating_point() else each for name, each in joined.items()}

    def _uploaded(self, parts: Sequence[Tensor]) -> Tensor:
        """Return `parts` end to end on the tower's device; the host does not wait for the copy to a GPU."""
        device = self._model.device
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        joined = torch.cat(tuple(parts), out=host_buffer(shape, parts[0].dtype, device))
        return joined.to(device, non_blocking=True)


def tower_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of `model` that only make rows of pictures: of its vision tower and its projector."""
    parts = (text_part(model), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    others = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


def _flat(rows: Any) -> Tensor:
    """Return the rows [N, H] in the result of a tower: a tensor [..., H], or several."""
    parts = rows if isinstance(rows, (list, tuple)) else [rows]
    return torch.cat([part.flatten(0, -2) for part in parts])
