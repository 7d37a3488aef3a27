"""Pictures in a loaded vision-language model: each row is a separate token.

A placeholder has the same id for every picture. So each row that replaces a placeholder gets its own id here, beyond
the vocabulary. Equal ids are then equal inputs again, and code that compares ids (tries of prefixes, slots, copies) is
correct without handling pictures. The model's input embedding is extended by these rows:

    picture ──image processor──▶ SeenPicture (inputs of the tower, ids `first ... last`)
    SeenPicture ──vision tower──▶ rows [rows, H]      once for each picture and version of the weights
    with pictures.holding(ids):  model(input_ids=ids, position_ids=pictures.positions(ids))

A placeholder's id that the policy samples is an ordinary token. Nothing here is specific to a family of models:
`get_image_features` makes the rows, `get_rope_index` the positions of models that have three for a token. Positions are
always passed; the model's memory of its last prompt is never used.

The embedding of a model without pictures is not changed.

Shapes: L = tokens of a sequence, N = rows of pictures, H = width of the text model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.models.host_copies import upload
from asyncrl.models.pictures.picture_ids import PictureIds, Rows, SeenPicture
from asyncrl.models.pictures.picture_processor import PictureProcessor
from asyncrl.models.pictures.picture_rules import placeholder_id
from asyncrl.models.pictures.rope_positions import IMAGE_TYPE, RopePositions, check_apart
from asyncrl.models.pictures.vision_tower import VisionTower
from asyncrl.models.transformers_internals import text_part


class _Held(NamedTuple):
    """The rows of pictures in the next input: of its N places `places_N` (in the flattened ids, of shape `shape`), each
    gets the row `rows_N` of `rows`."""

    shape: tuple[int, ...]
    places_N: Tensor
    rows_N: Tensor
    rows: Rows


class Pictures:
    """The pictures of `model`, whose input embedding is extended here.

    Args:
        model: a vision-language model of transformers.
        ids: ids of its pictures, and of pictures of other models of the same folder.
        attach: False if `attach` is called later, or never because another rank has the embedding.

    Attributes:
        ids: ids of the rows.
        tower: computes the rows.
        two_way: True if the tokens of a picture see each other in both directions, as Gemma 3's do.
    """

    def __init__(self, model: PreTrainedModel, ids: PictureIds, *, attach: bool = True) -> None:
        self._model, self.ids, self.tower = model, ids, VisionTower(model)
        whole = cast(Any, model.base_model)
        self._rope = RopePositions(whole.get_rope_index, ids.token_id) if hasattr(whole, "get_rope_index") else None
        self.two_way = "token_type_ids" in inspect.signature(type(whole).forward).parameters
        self._held: _Held | None = None
        self._is_row: Tensor | None = None
        if attach:
            self.attach()

    @classmethod
    def of(cls, model: PreTrainedModel, folder: Path, *, attach: bool = True) -> Pictures | None:
        """Return the pictures of the model loaded from `folder`; None if it takes none.

        Raises:
            PictureModelError: it takes pictures, and its folder lacks files that are needed to prepare them.
        """
        if not takes_pictures(model):
            return None
        token_id = cast(int, placeholder_id(model.config.to_dict()))
        processor = replace(PictureProcessor.of(folder), token_id=token_id)
        weight = cast(Tensor, model.get_input_embeddings().weight)
        first = max(weight.shape[0], model.config.get_text_config().vocab_size, token_id + 1)
        row_bytes = weight.shape[1] * weight.element_size()
        return cls(model, PictureIds(processor, VisionTower(model).input_names, first, row_bytes), attach=attach)

    def around(self, model: PreTrainedModel) -> Pictures:
        """Return the pictures of another model that reads them in the same way."""
        return Pictures(model, self.ids)

    # -- rows

    @contextmanager
    def holding(self, ids: NDArray[np.int64], *, keep: bool) -> Iterator[None]:
        """Within this block the embedding has the rows of the pictures in `ids`.

        Args:
            ids: the input of the forward passes within the block, in host memory. So the host does not wait for the
                device to learn which pictures there are.
            keep: see `VisionTower.rows`.
        """
        places_N = np.flatnonzero(ids >= self.ids.first)
        if not len(places_N):
            yield
            return
        ids_N = ids.reshape(-1)[places_N]
        pictures = self._of(ids_N)
        firsts_P, counts_P = (np.array([getattr(seen, name) for seen in pictures]) for name in ("first", "rows"))
        starts_P = counts_P.cumsum() - counts_P
        owner_N = np.searchsorted(firsts_P, ids_N, side="right") - 1
        there = upload({"places": places_N, "rows": starts_P[owner_N] + ids_N - firsts_P[owner_N]}, self._model.device)
        rows = self.tower.rows(pictures, keep=keep)
        deep = tuple(torch.cat(layer) for layer in zip(*(each.deep for each in rows), strict=True))
        joined = Rows(torch.cat([each.embeds for each in rows]), deep)
        self._held = _Held(ids.shape, there["places"], there["rows"], joined)
        try:
            yield
        finally:
            self._held = self._is_row = None

    def _of(self, ids_N: NDArray[np.int64]) -> list[SeenPicture]:
        """Return the distinct pictures that have the rows `ids_N`, by first id."""
        found: list[SeenPicture] = []
        for each in np.unique(ids_N).tolist():
            if found and each < found[-1].first + found[-1].rows:
                continue
            seen = self.ids.of_row(each)
            if seen is None:
                raise ValueError(f"id {each} is no token, and no row of a picture that is held")
            found.append(seen)
        return found

    def attach(self) -> None:
        """Make the held rows available to the embedding, and to layers that take further rows of a picture."""
        embedding = self._model.get_input_embeddings()
        plain = embedding.forward

        def forward(ids: Tensor) -> Tensor:
            held = self._held
            if held is None or ids.shape != held.shape:
                return cast(Tensor, plain(ids))
            self._is_row = is_row = ids >= self.ids.first
            embedded: Tensor = plain(ids.masked_fill(is_row, 0))
            rows_NH = held.rows.embeds[held.rows_N].to(embedded.dtype)
            return embedded.flatten(0, -2).index_copy(0, held.places_N, rows_NH).view_as(embedded)

        def before_layers(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            held = self._held
            if held is None or not held.rows.deep:
                return None
            deep = [layer[held.rows_N] for layer in held.rows.deep]
            return args, {**inputs, "visual_pos_masks": self._is_row, "deepstack_visual_embeds": deep}

        embedding.forward = forward  # hooks on the embedding see these ids
        if "deepstack_visual_embeds" in inspect.signature(type(text_part(self._model)).forward).parameters:
            text_part(self._model).register_forward_pre_hook(before_layers, with_kwargs=True)

    # -- positions

    @property
    def three_positions(self) -> bool:
        """True if a token has three positions (of time, height and width)."""
        return self._rope is not None

    def positions(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the positions [3, L] of the tokens `ids`; three equal ones if the model has one for each token."""
        length = len(ids)
        plain = np.broadcast_to(np.arange(length), (3, length))
        if self._rope is None:
            return plain
        known, delta = self._rope.of(self.ids.within(ids))
        size = min(known.shape[1], length)
        return np.concatenate((known[:, :size], plain[:, size:] + delta), axis=1)

    def delta(self, ids: Sequence[int]) -> int:
        """Return the difference between the position of a token after `ids` and its place.

        Raises:
            ValueError: two pictures are adjacent, and the model would take them for one.
        """
        if self._rope is None and not self.two_way:
            return 0
        within = self.ids.within(ids)
        check_apart(within)
        return 0 if self._rope is None else self._rope.of(within)[1]

    # -- what sees what

    def types(self, ids: Tensor) -> Tensor:
        """Return transformers' `token_type_ids`, from which a `two_way` model builds its masks."""
        return torch.where(ids >= self.ids.first, IMAGE_TYPE, 0)

    def blocks(self, ids_BU: Tensor, depths_BU: Tensor) -> Tensor:
        """Number the pictures of each row, [B, U]; -1 outside of them.

        Args:
            depths_BU: place of each token in its sequence, of which a row may have several.
        """
        is_row_BU = ids_BU >= self.ids.first
        goes_on_BU = torch.zeros_like(is_row_BU)
        goes_on_BU[:, 1:] = is_row_BU[:, :-1] & (depths_BU[:, 1:] == depths_BU[:, :-1] + 1)
        return torch.where(is_row_BU, (is_row_BU & ~goes_on_BU).cumsum(1), -1)

    def end_outside(self, ids: Sequence[int], end: int) -> int:
        """Return the first place from `end` on at which `ids` may be cut without cutting a picture."""
        while 0 < end < len(ids) and min(ids[end - 1], ids[end]) >= self.ids.first:
            end += 1
        return end

    # -- transformers' own way

    def plain_inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the inputs of transformers' own forward for one sequence: placeholders and pictures, no positions."""
        parameters = inspect.signature(self._model.forward).parameters
        within = [seen for _, seen in self.ids.within(ids)]
        device = self._model.device
        types = torch.tensor([[IMAGE_TYPE if each >= self.ids.first else 0 for each in ids]], device=device)
        inputs = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in parameters}
        return {
            "input_ids": torch.tensor([self.ids.plain(ids)], device=device),
            **inputs,
            **(self.tower.inputs(within) if within else {}),
        }


def takes_pictures(model: PreTrainedModel) -> bool:
    """True if `model` takes pictures: it has a vision tower, and a method that makes rows of pictures."""
    return hasattr(model.config, "vision_config") and hasattr(model.base_model, "get_image_features")
