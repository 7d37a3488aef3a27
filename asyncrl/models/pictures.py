"""Pictures in a loaded vision-language model: tokens of their own.

A placeholder has the same id whatever the picture. So each row that a picture puts in the place of a placeholder has an
id of its own here, beyond the vocabulary: equal ids are equal inputs again, and whatever compares ids (tries of
prefixes, slots, copies) is right without knowing of pictures. The model's input embedding is extended by these rows:

    picture ──image processor──▶ SeenPicture (inputs of the tower, ids `first ... last`)
    SeenPicture ──vision tower──▶ rows [rows, H]      once for each picture and version of the weights
    with pictures.holding(rows):  model(input_ids=ids, position_ids=pictures.positions(ids))

A placeholder's id that the policy samples stays what it is in the vocabulary. Nothing is written down for any one
family: `get_image_features` makes the rows, `get_rope_index` the positions of models that have three for a token.
Positions are always given; what a model remembers of its last prompt is never asked.

A model without pictures has none of this: its embedding is what transformers made.

Shapes: L = tokens of a sequence, N = rows of pictures, H = width of the text model.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.picture_processor import PictureProcessor
from asyncrl.models.transformers_internals import text_part

LAST_ID: Final = (1 << 31) - 1
"""Ids fit 32 bits, by which prefixes are sorted."""
RECENT_BYTES: Final = 256 << 20
"""Prepared pictures, and their rows, that are kept though no sample needs them, in bytes."""
_ROPE_CACHE: Final = 4096

_IMAGE_TYPE: Final = 1
"""Transformers' number for a place of a picture in `mm_token_type_ids` and `token_type_ids`."""


class Rows(NamedTuple):
    """Vectors of pictures: `embeds` [N, H] for the input, `deep` [N, H] for each of the first layers (DeepStack)."""

    embeds: Tensor
    deep: tuple[Tensor, ...]


@dataclass(eq=False)
class SeenPicture:
    """A picture as the model takes it.

    Attributes:
        sha256: of its encoded bytes.
        inputs: what `get_image_features` takes, on the CPU.
        rows: number of its rows.
        first: id of the first; the others follow.
        nbytes: memory of its inputs and rows.
        kept: its rows, and the count of weight updates before they were made.
    """

    sha256: str
    inputs: dict[str, Tensor]
    rows: int
    first: int
    nbytes: int
    kept: tuple[int, Rows] | None = field(default=None, repr=False)


class _Table(NamedTuple):
    """Rows of several pictures, one after the other: picture p has the ids from `firsts_P[p]` and begins at
    `starts_P[p]`."""

    firsts_P: Tensor
    starts_P: Tensor
    rows: Rows

    def places(self, ids_N: Tensor) -> Tensor:
        """Indices [N] into the rows."""
        owner_N = torch.searchsorted(self.firsts_P, ids_N, right=True) - 1
        return self.starts_P[owner_N] + ids_N - self.firsts_P[owner_N]


class Pictures:
    """The pictures of `model`, whose input embedding is extended here.

    Args:
        model: a vision-language model of transformers.
        processor: of its folder.

    Attributes:
        first: the first id that is no token of the vocabulary.
        token_id: the placeholder.
        three_positions: True if a token has three positions (of time, height and width).
        encoded: pictures that the vision tower has computed so far.
    """

    def __init__(self, model: PreTrainedModel, processor: PictureProcessor) -> None:
        self._model, self._processor = model, processor
        self._whole = cast(PreTrainedModel, model.base_model)
        self.token_id = processor.token_id
        embedding = model.get_input_embeddings()
        weight = cast(Tensor, embedding.weight)
        self.first = max(weight.shape[0], model.config.get_text_config().vocab_size, self.token_id + 1)
        self._row_bytes = weight.shape[1] * weight.element_size()
        self.three_positions = hasattr(self._whole, "get_rope_index")
        self.encoded = 0
        self._features: Callable[..., Any] = cast(Any, self._whole).get_image_features
        self._wanted = frozenset(inspect.signature(self._features).parameters)
        self._lock = threading.Lock()
        self._next: int = self.first
        self._seen: weakref.WeakValueDictionary[str, SeenPicture] = weakref.WeakValueDictionary()
        self._by_first: weakref.WeakValueDictionary[int, SeenPicture] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, SeenPicture] = OrderedDict()
        self._recent_bytes = 0
        self._rope: OrderedDict[tuple[tuple[int, str], ...], tuple[NDArray[np.int64], int]] = OrderedDict()
        self._epoch = 0
        self._table: _Table | None = None
        self._is_row: Tensor | None = None
        self._places: Tensor | None = None
        self._extend(embedding)

    @classmethod
    def of(cls, model: PreTrainedModel, folder: Path) -> Pictures | None:
        """The pictures of the model loaded from `folder`; None where it takes none.

        Raises:
            PictureModelError: it takes some, and its folder lacks what reads them in.
        """
        if not takes_pictures(model):
            return None
        return cls(model, PictureProcessor.of(folder))

    def around(self, model: PreTrainedModel) -> Pictures:
        """The pictures of another model that reads them in alike."""
        return Pictures(model, self._processor)

    # -- ids

    def seen(self, picture: Picture) -> SeenPicture:
        """`picture` prepared for the model; the same object as long as somebody holds it. For any thread.

        Raises:
            PictureError: it is damaged.
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
                self._remember(found)
            return found

    def shown(self, ids: Sequence[int], placed: Sequence[PlacedPicture]) -> tuple[list[int], list[SeenPicture]]:
        """`ids` with the rows of pictures in the place of their placeholders, and the pictures, which whoever uses
        these ids has to hold.

        Raises:
            ValueError: a picture's span has not as many placeholders as the picture has rows.
            PictureError: a picture is damaged.
        """
        shown, pictures = list(ids), []
        for number, each in enumerate(placed):
            seen = self.seen(each.picture)
            places = [at for at in range(each.position, each.end) if ids[at] == self.token_id]
            if len(places) != seen.rows:
                raise ValueError(
                    f"picture {number} of {each.picture.size} pixels has {seen.rows} rows, and its span from "
                    f"{each.position} to {each.end} has {len(places)} placeholders ({self.token_id}); render it anew"
                )
            for row, at in enumerate(places):
                shown[at] = seen.first + row
            pictures.append(seen)
        return shown, pictures

    def plain_ids(self, ids: Sequence[int]) -> list[int]:
        """`ids` with placeholders in the place of rows."""
        return [token if token < self.first else self.token_id for token in ids]

    def within(self, ids: Sequence[int]) -> list[tuple[int, SeenPicture]]:
        """The pictures of a sequence of ids, each with the position of its first row."""
        by_first = self._by_first
        return [(at, seen) for at, each in enumerate(ids) if each >= self.first and (seen := by_first.get(each))]

    def _take_ids(self, rows: int) -> int:
        if self._next + rows > LAST_ID:
            self._next = self.first
        for first, seen in sorted(self._by_first.items()):
            if first < self._next + rows and self._next < first + seen.rows:
                self._next = first + seen.rows
        self._next += rows
        return self._next - rows

    def _remember(self, seen: SeenPicture) -> None:
        self._recent[seen.sha256] = seen
        self._recent_bytes += seen.nbytes
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            _, old = self._recent.popitem(last=False)
            self._recent_bytes -= old.nbytes

    # -- rows

    def weights_changed(self) -> None:
        """Forget rows that were made before."""
        self._epoch += 1

    @contextmanager
    def holding(self, ids: Tensor, *, keep: bool) -> Iterator[None]:
        """Within it the embedding knows the rows of the pictures whose ids are in `ids`.

        Args:
            keep: use rows that were made since the last `weights_changed`, and keep those made now; else make all of
                them, with gradients where these are recorded.
        """
        pictures = self._of(ids)
        if not pictures:
            yield
            return
        rows = self._kept(pictures) if keep else self._encode(pictures)
        counts = torch.tensor([seen.rows for seen in pictures])
        self._table = _Table(
            torch.tensor([seen.first for seen in pictures]).to(ids.device),
            (counts.cumsum(0) - counts).to(ids.device),
            Rows(
                torch.cat([each.embeds for each in rows]),
                tuple(torch.cat(layer) for layer in zip(*(each.deep for each in rows), strict=True)),
            ),
        )
        try:
            yield
        finally:
            self._table = self._is_row = self._places = None

    def _of(self, ids: Tensor) -> list[SeenPicture]:
        """The distinct pictures in `ids`, by first id."""
        rows = torch.unique(ids[ids >= self.first]).tolist()
        found: list[SeenPicture] = []
        for each in rows:
            if found and each < found[-1].first + found[-1].rows:
                continue
            seen = self._by_first.get(each)
            if seen is None:
                raise ValueError(f"id {each} is no token, and no first row of a picture that is held")
            found.append(seen)
        return found

    def _kept(self, pictures: Sequence[SeenPicture]) -> list[Rows]:
        missing = [seen for seen in pictures if seen.kept is None or seen.kept[0] != self._epoch]
        if missing:
            with torch.no_grad():
                for seen, rows in zip(missing, self._encode(missing), strict=True):
                    seen.kept = (self._epoch, rows)
        return [cast(tuple[int, Rows], seen.kept)[1] for seen in pictures]

    def _encode(self, pictures: Sequence[SeenPicture]) -> list[Rows]:
        """Rows of each picture, by the vision tower; pictures of one shape are computed together."""
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
        output = self._features(**self._joined(pictures), return_dict=True)
        embeds = _flat(output.pooler_output)
        deep = tuple(map(_flat, getattr(output, "deepstack_features", None) or ()))
        counts = [seen.rows for seen in pictures]
        if len(embeds) != sum(counts):
            raise ValueError(f"the vision tower made {len(embeds)} rows of pictures with {sum(counts)} placeholders")
        parts = (torch.split(tensor.to(self._model.dtype), counts) for tensor in (embeds, *deep))
        return [Rows(embed, tuple(layers)) for embed, *layers in zip(*parts, strict=True)]

    def _joined(self, pictures: Sequence[SeenPicture]) -> dict[str, Tensor]:
        names = pictures[0].inputs
        joined = {name: torch.cat([seen.inputs[name] for seen in pictures]).to(self._model.device) for name in names}
        return {name: each.to(self._model.dtype) if each.is_floating_point() else each for name, each in joined.items()}

    def _extend(self, embedding: nn.Module) -> None:
        """Have the embedding, and the layers that take more of a picture, know the rows that are held."""
        plain = embedding.forward

        def forward(ids: Tensor) -> Tensor:
            table = self._table
            if table is None:
                return cast(Tensor, plain(ids))
            self._is_row = is_row = ids >= self.first
            self._places = table.places(ids[is_row])
            embedded: Tensor = plain(ids.masked_fill(is_row, 0))
            return embedded.masked_scatter(is_row[..., None], table.rows.embeds[self._places])

        def before_layers(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            table = self._table
            if table is None or not table.rows.deep:
                return None
            deep = [layer[self._places] for layer in table.rows.deep]
            return args, {**inputs, "visual_pos_masks": self._is_row, "deepstack_visual_embeds": deep}

        embedding.forward = forward  # hooks on the embedding see these ids
        if "deepstack_visual_embeds" in inspect.signature(type(text_part(self._model)).forward).parameters:
            text_part(self._model).register_forward_pre_hook(before_layers, with_kwargs=True)

    # -- positions

    def positions(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Positions [3, L] of the tokens `ids`; of a model that has one for each token three times the same."""
        length = len(ids)
        plain = np.broadcast_to(np.arange(length), (3, length))
        if not self.three_positions:
            return plain
        known, delta = self._rope_of(self.within(ids))
        size = min(known.shape[1], length)
        return np.concatenate((known[:, :size], plain[:, size:] + delta), axis=1)

    def delta(self, ids: Sequence[int]) -> int:
        """What is added to the place of a token after `ids` to give its position."""
        return self._rope_of(self.within(ids))[1] if self.three_positions else 0

    def _rope_of(self, within: Sequence[tuple[int, SeenPicture]]) -> tuple[NDArray[np.int64], int]:
        """Positions up to the last picture's end, and the delta behind it."""
        if not within:
            return np.zeros((3, 0), np.int64), 0
        key = tuple((at, seen.sha256) for at, seen in within)
        with self._lock:
            found = self._rope.get(key)
        if found is not None:
            return found
        last, seen = within[-1]
        types = torch.zeros(1, last + seen.rows, dtype=torch.long)
        for at, each in within:
            types[0, at : at + each.rows] = _IMAGE_TYPE
        ids = torch.where(types == _IMAGE_TYPE, self.token_id, 0)
        grids = torch.cat([each.inputs["image_grid_thw"] for _, each in within])
        rope = cast(Any, self._whole).get_rope_index
        places, deltas = rope(ids, mm_token_type_ids=types, image_grid_thw=grids)
        found = places[:, 0].numpy().astype(np.int64), int(deltas)
        with self._lock:
            self._rope[key] = found
            while len(self._rope) > _ROPE_CACHE:
                self._rope.popitem(last=False)
        return found

    # -- transformers' own way

    def plain_inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What transformers' own forward takes of one sequence: placeholders and pictures, no positions."""
        parameters = inspect.signature(self._model.forward).parameters
        within = [seen for _, seen in self.within(ids)]
        device = self._model.device
        types = torch.tensor([[_IMAGE_TYPE if each >= self.first else 0 for each in ids]], device=device)
        inputs = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in parameters}
        return {
            "input_ids": torch.tensor([self.plain_ids(ids)], device=device),
            **inputs,
            **(self._joined(within) if within else {}),
        }


def takes_pictures(model: PreTrainedModel) -> bool:
    """True if `model` reads pictures in: it has a vision tower, and a method that makes rows of pictures."""
    return hasattr(model.config, "vision_config") and hasattr(model.base_model, "get_image_features")


def _flat(rows: Any) -> Tensor:
    """Rows [N, H] of what a tower returns: a tensor [..., H], or several."""
    parts = rows if isinstance(rows, (list, tuple)) else [rows]
    return torch.cat([part.flatten(0, -2) for part in parts])
