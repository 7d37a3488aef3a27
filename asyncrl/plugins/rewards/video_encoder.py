"""V-JEPA 2 (arXiv:2506.09985) as a frozen encoder of clips, for `asyncrl.plugins.rewards.srpo`.

Loads torch, so it is given by import path and loaded only in the reward's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, VJEPA2Model

from asyncrl.api.picture import Picture

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet, as in the model's preprocessor_config.json."""


class VJEPA2Encoder:
    """Mean of the encoder's last hidden states over all places and times, as in siiRL's `video_emb.py`.

    Frames are resized to the model's side without keeping their aspect ratio, because simulators' frames are squares.
    transformers' own processor is not used, because it needs torchvision.

    Args:
        folder: a model that transformers loads as `VJEPA2Model`.
        device: device of the model, such as `cpu` or `cuda:1`.
        dtype: type of its weights, such as `float32` or `bfloat16`.
        batch: clips that are computed together.

    Raises:
        ValueError: `folder` has another model, or `dtype` is not a type.
    """

    def __init__(self, *, folder: str, device: str = "cpu", dtype: str = "float32", batch: int = 8) -> None:
        path = Path(folder).expanduser()
        kind = AutoConfig.from_pretrained(path).model_type
        if kind != "vjepa2":
            raise ValueError(f"encoder_args.folder={folder!r} has a model of the type {kind!r}: name a V-JEPA 2 model")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"encoder_args.dtype={dtype!r}: use float32, bfloat16 or float16")
        torch.set_num_threads(1)
        loaded: Any = VJEPA2Model.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
        model, found = loaded
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"encoder_args.folder={folder!r}: its files lack {missing[0]} ({len(missing)} missing), which would "
                "get random values; take config.json and files of the same model"
            )
        self._model = model.to(device).eval()
        self._side, self._batch = int(self._model.config.crop_size), batch

    @torch.no_grad()
    def __call__(self, clips: Sequence[Sequence[Picture]]) -> NDArray[np.float64]:
        """Return the embeddings `[N, H]` of N clips, which have the same number of frames."""
        found = []
        for start in range(0, len(clips), self._batch):
            videos = torch.stack([self.video(clip) for clip in clips[start : start + self._batch]])
            tokens = self._model.get_vision_features(videos.to(self._model.device, self._model.dtype))
            found.append(tokens.float().mean(1).cpu())
        return torch.cat(found).double().numpy()

    def video(self, clip: Sequence[Picture]) -> Tensor:
        """Return the frames in the model's format, `[T, 3, side, side]`."""
        resized = {frame.sha256: _resized(frame, self._side) for frame in clip}
        video_THW3 = torch.from_numpy(np.stack([resized[frame.sha256] for frame in clip])).float() / 255
        return ((video_THW3 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)


def _resized(frame: Picture, side: int) -> NDArray[np.uint8]:
    return np.asarray(frame.image().resize((side, side), Image.Resampling.BILINEAR))
