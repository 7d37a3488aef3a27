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

A picture is prepared once, as long as it is referenced (`PictureIds`).

The embedding of a model without pictures is not changed.

Shapes: L = tokens of a sequence, N = rows of pictures, H = width of the text model.
"""

from __future__ import annotations

import inspect
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.host_copies import host_buffer, upload
from asyncrl.models.model_config import placeholder_id
from asyncrl.models.picture_rules import PictureProcessor
from asyncrl.models.transformers_internals import takes_pictures, text_part, tower_parameters

LAST_ID: Final = (1 << 31) - 1
"""Ids fit 32 bits, by which prefixes are sorted."""
RECENT_BYTES: Final = 256 << 20
"""Bytes of prepared pictures, with their rows, that are held even if no sample needs them."""
_CACHE: Final = 512
"""Number of prompts whose positions are cached: those of 2,000 tokens take 48 kB."""
_SIDE: Final = 32
"""Side of the parity check's pictures, in pixels."""
_SEED: Final = 77
IMAGE_TYPE: Final = 1
"""Transformers' number for a place of a picture in `mm_token_type_ids` and `token_type_ids`."""


class Rows(NamedTuple):
    """Vectors of pictures: `embeds` [N, H] for the input, `deep` [N, H] for each of the first layers (DeepStack)."""

    embeds: Tensor
    deep: tuple[Tensor, ...]


@dataclass(eq=False)
class SeenPicture:
    """A picture prepared for the model.

    Attributes:
        sha256: hash of the encoded bytes.
        inputs: arguments of `get_image_features`, on the CPU.
        rows: number of rows.
        first: id of the first row; the others follow.
        nbytes: memory of inputs and rows.
        kept: the rows, and the weights that they were computed with.
    """

    sha256: str
    inputs: dict[str, Tensor]
    rows: int
    first: int
    nbytes: int
    kept: tuple[object, Rows] | None = field(default=None, repr=False)


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

    # -- tokens

    def shown(
        self, sequences: Sequence[Sequence[int]], placed: Sequence[Sequence[PlacedPicture]]
    ) -> tuple[list[Sequence[int]], list[SeenPicture]]:
        """Return `sequences` with the ids of their pictures' rows, and the pictures.

        The caller must keep the pictures alive as long as it uses these ids.

        Args:
            placed: pictures of each sequence; empty if no sequence has any.
        """
        if not placed:
            return list(sequences), []
        made = [self.ids.shown(*each) for each in zip(sequences, placed, strict=True)]
        return [ids for ids, _ in made], [seen for _, held in made for seen in held]

    def tokens(
        self, sequences: Sequence[Sequence[int]], device: torch.device, held: Sequence[SeenPicture] = ()
    ) -> ShownTokens:
        """Return the tokens of sequences of ids, rows of pictures included."""
        host_ids_T = np.array([token for tokens in sequences for token in tokens], dtype=np.int64)
        ids_T = torch.from_numpy(host_ids_T).to(device)
        positions_3T = None
        if self.three_positions:
            positions_3T = np.concatenate([self.positions(tokens) for tokens in sequences], axis=1)
        return ShownTokens(ids_T, host_ids_T, positions_3T, self.types(ids_T) if self.two_way else None, held)

    # -- rows

    @contextmanager
    def holding(self, ids: NDArray[np.int64], *, keep: bool) -> Iterator[None]:
        """Within this block the embedding has the rows of the pictures in `ids`.

        Args:
            ids: the input of the forward passes within the block, in host memory. So the host does not wait for the
                device to learn which pictures there are.
            keep: see `VisionTower.rows`.
        """
        indices_N = np.flatnonzero(ids >= self.ids.first)
        if not len(indices_N):
            yield
            return
        ids_N = ids.reshape(-1)[indices_N]
        pictures = self._of(ids_N)
        firsts_P, counts_P = (np.array([getattr(seen, name) for seen in pictures]) for name in ("first", "rows"))
        starts_P = counts_P.cumsum() - counts_P
        owner_N = np.searchsorted(firsts_P, ids_N, side="right") - 1
        there = upload(
            {"indices": indices_N, "rows": starts_P[owner_N] + ids_N - firsts_P[owner_N]}, self._model.device
        )
        rows = self.tower.rows(pictures, keep=keep)
        deep = tuple(torch.cat(layer) for layer in zip(*(each.deep for each in rows), strict=True))
        joined = Rows(torch.cat([each.embeds for each in rows]), deep)
        self._held = _Held(ids.shape, there["indices"], there["rows"], joined)
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
            return embedded.flatten(0, -2).index_copy(0, held.indices_N, rows_NH).view_as(embedded)

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
        continues_BU = torch.zeros_like(is_row_BU)
        continues_BU[:, 1:] = is_row_BU[:, :-1] & (depths_BU[:, 1:] == depths_BU[:, :-1] + 1)
        return torch.where(is_row_BU, (is_row_BU & ~continues_BU).cumsum(1), -1)

    def end_outside(self, ids: Sequence[int], end: int) -> int:
        """Return the first place from `end` on at which `ids` may be cut without cutting a picture."""
        while 0 < end < len(ids) and min(ids[end - 1], ids[end]) >= self.ids.first:
            end += 1
        return end

    # -- transformers' own way

    def probes(self, sequences: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[SeenPicture]]:
        """Return sequences with pictures for the parity check, and the pictures, which the caller must hold while it
        uses these ids.

        The first and the third have the same text around different pictures. Those at even and at odd places have
        neither tokens nor pictures in common if the same holds for `sequences`.
        """
        draw = random.Random(_SEED)
        sides = [np.frombuffer(draw.randbytes(3 * _SIDE * _SIDE), np.uint8).reshape(_SIDE, _SIDE, 3) for _ in range(3)]
        one, other, third = held = [self.ids.seen(Picture.from_array(pixels)) for pixels in sides]
        token_id = self.ids.token_id

        def text(tokens: Sequence[int]) -> list[int]:
            another = next((token for token in tokens if token != token_id), token_id)
            return [another if token == token_id else token for token in tokens]  # or it would count as a picture

        def shown(before: list[int], seen: SeenPicture, after: list[int]) -> list[int]:
            return [*before, *range(seen.first, seen.first + seen.rows), *after]

        even, odd = map(text, sequences[:2])
        half = len(odd) // 2
        made = [
            shown(even[:2], one, even[2:]),
            shown(odd[:2], third, [*odd[2:], *odd[:half]]),
            shown(even[:2], other, even[2:]),
            shown(odd[:half][:2], third, [*odd[:half][2:], *odd]),
        ]
        return [*made, shown(made[0][:-half], other, even[:9])], held

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


@dataclass(frozen=True, eq=False)
class ShownTokens:
    """Tokens as a model that takes pictures sees them.

    Attributes:
        ids_T: [T], with the ids of pictures' rows in place of their placeholders; on the device.
        host_ids_T: the same, in host memory.
        positions_3T: three positions of each token; None if the positions are the places in the sequences.
        types_T: [T], transformers' `token_type_ids`; None if the model takes none.
        held: the pictures, kept alive as long as these ids are used.
    """

    ids_T: Tensor
    host_ids_T: NDArray[np.int64]
    positions_3T: NDArray[np.int64] | None
    types_T: Tensor | None
    held: Sequence[SeenPicture]

    def positions(self, sources: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the tokens `sources` [rows, width], whose places are `indices`: `indices` itself, or
        three positions of each token, [3, rows, width].
        """
        return indices if self.positions_3T is None else np.ascontiguousarray(self.positions_3T[:, sources])


class _Held(NamedTuple):
    """The rows of pictures in the next input: of its N places `indices_N` (in the flattened ids, of shape `shape`),
    each gets the row `rows_N` of `rows`.
    """

    shape: tuple[int, ...]
    indices_N: Tensor
    rows_N: Tensor
    rows: Rows


class PictureIds:
    """The pictures of one model folder, by ids beyond its vocabulary. For any thread.

    The most recently prepared pictures are held, up to `RECENT_BYTES`, and always the last one.

    Args:
        processor: prepares the pictures.
        wanted: the prepared arrays that the model takes, by name.
        first: first id beyond the vocabulary.
        row_bytes: memory of a row.

    Attributes:
        token_id: the placeholder.
    """

    def __init__(self, processor: PictureProcessor, wanted: Collection[str], first: int, row_bytes: int) -> None:
        self._processor, self._wanted, self._row_bytes = processor, frozenset(wanted), row_bytes
        self.token_id, self.first = processor.token_id, first
        self._lock = threading.Lock()
        self._next: int = first
        self._seen: weakref.WeakValueDictionary[str, SeenPicture] = weakref.WeakValueDictionary()
        self._by_first: weakref.WeakValueDictionary[int, SeenPicture] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, SeenPicture] = OrderedDict()
        self._recent_bytes = 0

    def at(self, first: int) -> SeenPicture | None:
        """Return the picture whose rows begin with the id `first`; None if there is none."""
        return self._by_first.get(first)

    def of_row(self, row: int) -> SeenPicture | None:
        """Return the picture that has the row of this id; None if there is none."""
        for first in range(row, self.first - 1, -1):
            if (seen := self.at(first)) is not None:
                return seen if row < first + seen.rows else None
        return None

    def seen(self, picture: Picture) -> SeenPicture:
        """Prepare `picture` for the model; returns the same object as long as it is referenced. For any thread.

        Raises:
            PictureError: the picture is damaged.
        """
        with self._lock:
            found = self._seen.get(picture.sha256)
            if found is not None:
                return found
        made, rows = self._processor.read(picture.image())
        inputs = {name: torch.as_tensor(np.asarray(value)) for name, value in made.items() if name in self._wanted}
        with self._lock:
            found = self._seen.get(picture.sha256)
            if found is None:
                size = sum(tensor.nbytes for tensor in inputs.values()) + rows * self._row_bytes
                found = SeenPicture(picture.sha256, inputs, rows, self._take_ids(rows), size)
                self._seen[picture.sha256] = self._by_first[found.first] = found
                self._hold(found)
            return found

    def shown(self, ids: Sequence[int], placed: Sequence[PlacedPicture]) -> tuple[list[int], list[SeenPicture]]:
        """Replace placeholders in `ids` by the rows of pictures. Return the new ids and the pictures.

        The caller must keep the pictures alive as long as it uses these ids.

        Raises:
            ValueError: the number of placeholders in a picture's span differs from the number of its rows.
            PictureError: a picture is damaged.
        """
        shown, pictures = list(ids), []
        for number, each in enumerate(placed):
            seen = self.seen(each.picture)
            indices = [at for at in range(each.position, each.end) if ids[at] == self.token_id]
            if len(indices) != seen.rows:
                raise ValueError(
                    f"picture {number} of {each.picture.size} pixels has {seen.rows} rows, and its span from "
                    f"{each.position} to {each.end} has {len(indices)} placeholders ({self.token_id}); render it anew"
                )
            for row, at in enumerate(indices):
                shown[at] = seen.first + row
            pictures.append(seen)
        return shown, pictures

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with placeholders in place of rows."""
        return [token if token < self.first else self.token_id for token in ids]

    def within(self, ids: Sequence[int]) -> list[tuple[int, SeenPicture]]:
        """Return the pictures of a sequence of ids, each with the position of its first row."""
        return [(at, seen) for at, each in enumerate(ids) if each >= self.first and (seen := self.at(each))]

    def _hold(self, seen: SeenPicture) -> None:
        """Hold `seen`, and release the oldest pictures beyond `RECENT_BYTES`."""
        self._recent[seen.sha256] = seen
        self._recent_bytes += seen.nbytes
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            _, old = self._recent.popitem(last=False)
            self._recent_bytes -= old.nbytes

    def _take_ids(self, rows: int) -> int:
        if self._next + rows > LAST_ID:
            self._next = self.first
        for first, seen in sorted(self._by_first.items()):
            if first < self._next + rows and self._next < first + seen.rows:
                self._next = first + seen.rows
        self._next += rows
        return self._next - rows


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


def _flat(rows: Any) -> Tensor:
    """Return the rows [N, H] in the result of a tower: a tensor [..., H], or several."""
    parts = rows if isinstance(rows, (list, tuple)) else [rows]
    return torch.cat([part.flatten(0, -2) for part in parts])


class RopePositions:
    """Positions of prompts with pictures; recent ones are cached. For any thread.

    Args:
        index: `get_rope_index` of the model.
        token_id: the placeholder.
    """

    def __init__(self, index: Callable[..., Any], token_id: int) -> None:
        self._index, self._token_id = index, token_id
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[tuple[int, str], ...], tuple[NDArray[np.int64], int]] = OrderedDict()

    def of(self, within: Sequence[tuple[int, SeenPicture]]) -> tuple[NDArray[np.int64], int]:
        """Return the positions `[3, L]` up to the last picture's end, and the delta after it.

        Args:
            within: the pictures of a prompt, each with the position of its first row.

        Raises:
            ValueError: two pictures are adjacent.
        """
        if not within:
            return np.zeros((3, 0), np.int64), 0
        key = tuple((at, seen.sha256) for at, seen in within)
        with self._lock:
            found = self._known.get(key)
        if found is not None:
            return found
        check_apart(within)
        last, seen = within[-1]
        types = torch.zeros(1, last + seen.rows, dtype=torch.long)
        for at, each in within:
            types[0, at : at + each.rows] = IMAGE_TYPE
        ids = torch.where(types == IMAGE_TYPE, self._token_id, 0)
        grids = torch.cat([each.inputs["image_grid_thw"] for _, each in within])
        indices, deltas = self._index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        found = indices[:, 0].numpy().astype(np.int64), int(deltas)
        with self._lock:
            self._known[key] = found
            while len(self._known) > _CACHE:
                self._known.popitem(last=False)
        return found


def check_apart(within: Sequence[tuple[int, SeenPicture]]) -> None:
    """Check that there is a token between each picture and the next: the model would treat adjacent pictures as one.

    Raises:
        ValueError: two pictures are adjacent.
    """
    for (at, before), (after, _) in pairwise(within):
        if at + before.rows == after:
            raise ValueError(f"the picture at {after} follows another without a token between them")
