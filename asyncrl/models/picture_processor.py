"""The image processor and the processor class in a model's folder, without torch and without video.

Everything that is particular to a family of models is asked of transformers:

    marker         text that the chat template writes once for a picture (`processor.image_token`)
    text           text that stands for a picture of some size in the prompt (`processor.replace_image_token`)
    token_id       token at whose places the picture's rows stand (`image_token_id` of the config)

A processor that also takes videos cannot be made where torchvision is not installed; here it is made without.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from asyncrl.models.picture_rules import placeholder_id

CONFIG_FILE = "config.json"


class PictureModelError(ValueError):
    """A model folder whose pictures cannot be read in; the message says why."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`."""
    found: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, eq=False)
class PictureProcessor:
    """See the module.

    Attributes:
        images: transformers' image processor.
        token_id, placeholder: the token of a picture's rows, and its text.
        marker: what the chat template writes for a picture.
    """

    images: Any
    token_id: int
    placeholder: str
    marker: str
    _processor: Any

    @classmethod
    def of(cls, folder: Path) -> PictureProcessor:
        """That of the model in `folder`.

        Raises:
            PictureModelError: it takes no pictures, or its folder lacks what reads them in.
        """
        from transformers import AutoTokenizer

        config = read_config(folder)
        kind, token_id = str(config.get("model_type")), placeholder_id(config)
        if token_id is None:
            raise PictureModelError(f"{kind} in {folder} takes no pictures: its config names no token for them")
        images = image_processor(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        processor = _without_video(_processor_class(kind, folder), images, tokenizer, folder)
        marker = getattr(processor, "image_token", None)
        if not isinstance(marker, str):
            raise PictureModelError(f"{kind} in {folder}: its processor names no image_token, the text for a picture")
        return cls(images, token_id, str(tokenizer.convert_ids_to_tokens(token_id)), marker, processor)

    def text_of_size(self, width: int, height: int) -> str:
        """Text that stands in a prompt for a picture of so many pixels."""
        _, texts = self._processed(Image.new("RGB", (width, height)))
        if self.placeholder not in texts[0]:
            raise PictureModelError(f"a picture of {width} x {height} pixels has no {self.placeholder!r} in its text")
        return texts[0]

    def read(self, image: Image.Image) -> tuple[dict[str, Any], int]:
        """Prepare a picture: arrays by transformers' names, which the model takes, and the number of its rows."""
        made, texts = self._processed(image)
        return dict(made), texts[0].count(self.placeholder)

    def _processed(self, image: Image.Image) -> tuple[Mapping[str, Any], list[str]]:
        settings = self._processor._merge_kwargs(tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs)
        found: tuple[Mapping[str, Any], list[str]] = self._processor._process_images(
            [image], **settings["images_kwargs"]
        )
        return found


def image_processor(folder: Path) -> Any:
    """Transformers' image processor of the model in `folder`, the one that needs Pillow alone.

    Raises:
        PictureModelError: the folder has none.
    """
    from transformers import AutoImageProcessor

    try:
        made: Any = AutoImageProcessor
        return made.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PictureModelError(
            f"{folder} holds no image processor that works without torchvision: {reason}"
        ) from error


def _processor_class(kind: str, folder: Path) -> Any:
    """Transformers' processor class for models of `kind`, whatever it would need for videos."""
    from transformers.models.auto import processing_auto

    name = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(kind)
    place = vars(importlib.import_module("transformers"))["_class_to_module"].get(name)
    if name is None or place is None:
        raise PictureModelError(f"transformers has no processor for {kind!r} in {folder}")
    try:
        module: Any = importlib.import_module(
            f"transformers.{place}"
        )  # past the stand-in that wants torchvision, for videos
    except ImportError as error:
        raise PictureModelError(
            f"pictures of {kind!r} are not supported: transformers' {name} is made of {error.name}, which asyncrl does "
            "without"
        ) from error
    if hasattr(module, "num2words"):  # SmolVLM's names frames of videos with it, and asks for it in any case
        module.num2words = module.num2words or str
    return getattr(module, name)


def _without_video(kind: Any, images: Any, tokenizer: Any, folder: Path) -> Any:
    """The processor of class `kind` with what the folder says of it, and with nothing that reads videos or sounds."""

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    Processor.__name__ = kind.__name__
    parts = {"image_processor": images, "tokenizer": tokenizer}
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    known = {name: value for name, value in settings.items() if name not in kind.get_attributes()}
    return Processor.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], known)
