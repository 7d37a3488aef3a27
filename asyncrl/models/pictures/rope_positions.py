"""Positions of models that have three for a token (time, height and width), by transformers' `get_rope_index`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.models.pictures.picture_ids import SeenPicture

_CACHE: Final = 512
"""Number of prompts whose positions are cached: those of 2,000 tokens take 48 kB."""

IMAGE_TYPE: Final = 1
"""Transformers' number for a place of a picture in `mm_token_type_ids` and `token_type_ids`."""


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
        places, deltas = self._index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        found = places[:, 0].numpy().astype(np.int64), int(deltas)
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
