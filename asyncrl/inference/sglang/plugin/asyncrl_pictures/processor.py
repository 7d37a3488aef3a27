"""The processor: takes token ids and pictures with their places in these, and keeps the ids as they are.

SGLang's own processors decode the ids to text, tokenise it again and search for pictures in the result.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.glm4v import Glm4vForConditionalGeneration
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen2_vl import Qwen2VLForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from transformers import AutoImageProcessor

from .positions import positions

_LEAST_AGE_S = 60.0
"""Time that a picture is kept after its last use, whatever the limit: the request that brings it names it again."""


def _module_at(path: Path) -> ModuleType:
    """Return the module in a file of asyncrl that imports nothing else of it."""
    spec = importlib.util.spec_from_file_location(f"asyncrl_pictures_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_picture = _module_at(Path(__file__).parents[4] / "api" / "picture.py")


@dataclass(frozen=True)
class _Placed:
    """A picture at a span of a prompt; `data` is empty if an earlier prompt of the request has it."""

    position: int
    length: int
    sha256: str
    data: str

    @classmethod
    def of(cls, text: object) -> _Placed:
        """Read `POSITION:LENGTH:SHA256:BASE64`; SGLang may have put it into an object as a URL."""
        parts = str(getattr(text, "url", text)).split(":")
        if len(parts) != 4 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            raise ValueError("this server reads pictures in for asyncrl: give POSITION:LENGTH:SHA256:BASE64")
        return cls(int(parts[0]), int(parts[1]), parts[2], parts[3])


@dataclass(frozen=True)
class _Prepared:
    """A picture as the vision tower takes it: patches, and the grid [1, 3] that they form."""

    patches: torch.Tensor
    grid: torch.Tensor


class _Store:
    """Prepared pictures by hash, the newest up to `limit` bytes. Within one event loop."""

    def __init__(self, images: Any, limit: int) -> None:
        self._images, self._limit, self._bytes = images, limit, 0
        self._known: OrderedDict[str, tuple[asyncio.Task[_Prepared], float]] = OrderedDict()

    def keep(self, sha256: str, data: bytes) -> None:
        """Have a picture prepared, in a thread, unless it is known."""
        if sha256 not in self._known:
            task = asyncio.create_task(asyncio.to_thread(self._prepare, sha256, data))
            self._known[sha256] = task, time.monotonic()
            task.add_done_callback(lambda _: self._prepared(sha256, task))

    async def get(self, sha256: str) -> _Prepared:
        """Return a picture that `keep` was called with.

        Raises:
            ValueError: it was not, or it is damaged.
        """
        known = self._known.get(sha256)
        if known is None:
            raise ValueError(f"the picture {sha256} is not here; send its data with the first prompt that shows it")
        self._known[sha256] = known[0], time.monotonic()
        self._known.move_to_end(sha256)
        return await asyncio.shield(known[0])

    def _prepare(self, sha256: str, data: bytes) -> _Prepared:
        image = _picture.Picture.received(data, sha256).image()
        made = self._images(images=[image], return_tensors="np")
        return _Prepared(
            torch.from_numpy(np.asarray(made["pixel_values"], np.float32)),
            torch.from_numpy(np.asarray(made["image_grid_thw"], np.int64)),
        )

    def _prepared(self, sha256: str, task: asyncio.Task[_Prepared]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._known[sha256]
            return
        self._bytes += task.result().patches.nbytes
        oldest = list(self._known.items())
        for name, (kept, used) in oldest:
            if self._bytes <= self._limit or time.monotonic() - used < _LEAST_AGE_S:
                return
            if kept.done():
                self._bytes -= kept.result().patches.nbytes
                del self._known[name]


class PlacedPictures(BaseMultimodalProcessor):  # type: ignore[misc]
    """Models whose pictures are one run of placeholders each, and whose tokens have three positions.

    `image_data` of a prompt is a list of texts as of `asyncrl.inference.messages.inline_picture`.
    """

    models = [  # noqa: RUF012 as SGLang has it
        Qwen2VLForConditionalGeneration,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLForConditionalGeneration,
        Glm4vForConditionalGeneration,
    ]
    prefer_tokenized_input = True

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        self._token_id = int(hf_config.image_token_id)
        self._merge = int(hf_config.vision_config.spatial_merge_size)
        made: Any = AutoImageProcessor
        images = made.from_pretrained(server_args.model_path, local_files_only=True, backend="pil")
        self._store = _Store(images, int(os.environ["ASYNCRL_PICTURE_BYTES"]))

    async def process_mm_data_async(
        self,
        image_data: Sequence[object] | None = None,
        audio_data: object = None,
        input_text: Sequence[int] | str | None = None,
        request_obj: object = None,
        **kwargs: object,
    ) -> MultimodalProcessorOutput:
        """Return the prompt's ids, unchanged, and its pictures.

        Raises:
            ValueError: the prompt is no list of ids, a picture is damaged or unknown, or its span does not fit.
        """
        if isinstance(input_text, str) or input_text is None or audio_data or getattr(request_obj, "video_data", None):
            raise ValueError("this server reads pictures in for asyncrl: give input_ids, and pictures alone")
        ids, placed = list(input_text), [_Placed.of(each) for each in image_data or ()]
        for each in placed:
            if each.data:
                self._store.keep(each.sha256, base64.b64decode(each.data))
        prepared = [await self._store.get(each.sha256) for each in placed]
        grids = [(int(one.grid[0, 1]) // self._merge, int(one.grid[0, 2]) // self._merge) for one in prepared]
        found, delta = positions(len(ids), [(each.position, each.length) for each in placed], grids)
        items = [self._item(ids, each, one) for each, one in zip(placed, prepared, strict=True)]
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=ids,
            im_token_id=self._token_id,
            mrope_positions=torch.from_numpy(found),
            mrope_position_delta=torch.tensor([[delta]]),
        )

    def _item(self, ids: Sequence[int], placed: _Placed, prepared: _Prepared) -> MultimodalDataItem:
        first, end = placed.position, placed.position + placed.length
        if any(token != self._token_id for token in ids[first:end]):
            raise ValueError(f"the picture at tokens {first} to {end} is not at placeholders ({self._token_id}) alone")
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=prepared.patches, offsets=[(first, end - 1)])
        item.set("image_grid_thw", prepared.grid)
        item.set_identity(bytes.fromhex(placed.sha256))  # prefixes are shared by the pictures' content
        return item
