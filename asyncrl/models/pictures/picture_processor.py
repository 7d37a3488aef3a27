"""The image processor and the processor class in a model's folder, without torch and without video.

Everything specific to a family of models comes from transformers:

    marker         text that the chat template writes once for a picture (`processor.image_token`)
    text           text that represents a picture of some size in the prompt (`processor.replace_image_token`)
    token_id       token that is replaced by the picture's rows (`image_token_id` of the config)

A processor that also takes videos cannot be made without torchvision; here it is made without its video part.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_id


class PictureModelError(ValueError):
    """The pictures of the model in a folder cannot be prepared; the message says why."""


@dataclass(frozen=True, eq=False)
class PictureProcessor:
    """Picture processing of a model's folder.

    Attributes:
        images: transformers' image processor.
        token_id, placeholder: the token of a picture's rows, and its text.
        marker: the text that the chat template writes for a picture.
    """

    images: Any
    token_id: int
    placeholder: str
    marker: str
    _processor: Any

    @classmethod
    def of(cls, folder: Path) -> PictureProcessor:
        """Return the processor of the model in `folder`.

        Raises:
            PictureModelError: the model takes no pictures, or its folder lacks files that are needed to prepare them.
        """
        from transformers import AutoTokenizer

        config = read_model_config(folder)
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
        """Return the text that represents a picture of this size, in pixels, in a prompt."""
        _, texts = self._processed(Image.new("RGB", (width, height)))
        if self.placeholder not in texts[0]:
            raise PictureModelError(f"a picture of {width} x {height} pixels has no {self.placeholder!r} in its text")
        return texts[0]

    def read(self, image: Image.Image) -> tuple[dict[str, Any], int]:
        """Prepare a picture: return the model's input arrays, by transformers' names, and the number of its rows."""
        made, texts = self._processed(image)
        return dict(made), texts[0].count(self.placeholder)

    def _processed(self, image: Image.Image) -> tuple[Mapping[str, Any], list[str]]:
        merged = self._processor._merge_kwargs(tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs)
        settings = merged["images_kwargs"]
        if settings.get("return_tensors"):  # Pixtral's would return torch's
            settings["return_tensors"] = "np"
        found: tuple[Mapping[str, Any], list[str]] = self._processor._process_images([image], **settings)
        return found


def image_processor(folder: Path) -> Any:
    """Return transformers' image processor of the model in `folder`, the variant that needs only Pillow.

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
    """Return transformers' processor class for models of `kind`, even if its requirements for videos are missing."""
    from transformers.models.auto import processing_auto

    name = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(kind)
    place = vars(importlib.import_module("transformers"))["_class_to_module"].get(name)
    if name is None or place is None:
        raise PictureModelError(f"transformers has no processor for {kind!r} in {folder}")
    try:
        module = _imported(f"transformers.{place}")  # past the stand-in that wants torchvision, for videos
    except ImportError as error:
        raise PictureModelError(
            f"pictures of {kind!r} are not supported: transformers' {name} is made of {error.name}, which asyncrl does "
            "without"
        ) from error
    if hasattr(module, "num2words"):  # SmolVLM's processor needs it only for videos, but requires it always
        module.num2words = module.num2words or str
    return getattr(module, name)


def _imported(name: str) -> Any:
    """Import the module `name` of a processor.

    Pixtral's imports a function from its image processor for torchvision. The image processor for Pillow has the same
    function and replaces it.

    Raises:
        ImportError: the module needs more of torchvision.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.rpartition(".")[0]
        family = package.rpartition(".")[2]
        theirs = f"{package}.image_processing_{family}"
        if importlib.util.find_spec(f"{package}.image_processing_pil_{family}") is None or theirs in sys.modules:
            raise
        sys.modules[theirs] = importlib.import_module(f"{package}.image_processing_pil_{family}")
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules[theirs]


def _without_video(kind: Any, images: Any, tokenizer: Any, folder: Path) -> Any:
    """Return a processor of class `kind` with the folder's settings, without parts that read videos or sounds."""

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    Processor.__name__ = kind.__name__
    parts = {"image_processor": images, "tokenizer": tokenizer}
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    known = {name: value for name, value in settings.items() if name not in kind.get_attributes()}
    return Processor.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], known)
