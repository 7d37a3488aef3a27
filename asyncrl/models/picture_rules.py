"""The text that represents a picture in a model's prompts, and the arrays that the model takes of it, without torch.

The processor in the model's folder decides, only from the picture's size, how many tokens a picture takes and which
text is around and between them. Everything specific to a family of models comes from transformers:

    marker         text that the chat template writes once for a picture (`processor.image_token`)
    text           text that represents a picture of some size in the prompt (`processor.replace_image_token`)
    token_id       token that is replaced by the picture's rows (`image_token_id` of the config)

Processes without torch have `PictureRules`. It starts this module as a program, a process with the processor
(`PictureProcessor`) but without torch, and sends it one request for each size. The program reads lines of JSON,
`[width, height]`, and answers each with one: `{"text": ...}` or `{"error": ...}`. Its first output line describes the
model: `{"marker", "placeholder", "token_id"}`, or `{"error": ...}`. Only Pillow's image processors are used, so the
process takes some 90 MB instead of 400 and starts in two seconds of CPU time. It ends with its input, or after a minute
without a request.

A processor that also takes videos cannot be made without torchvision; here it is made without its video part.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

from asyncrl.models.model_config import placeholder_id, read_model_config

if TYPE_CHECKING:
    from PIL import Image

ANSWER_S: Final = 120.0
"""Longest wait for an answer: the first one takes some seconds of imports, and many on a busy machine."""
KNOWN_SIZES: Final = 1024
"""Number of sizes whose texts are cached: the text of a large picture has some 10 kB."""
IDLE_S: Final = 60.0
_KEPT_OUT: Final = frozenset({"torch", "torchvision", "torchaudio"})


class PictureRulesError(ValueError):
    """The model in a folder does not accept a picture; the message says why."""


class PictureModelError(ValueError):
    """The pictures of the model in a folder cannot be prepared; the message says why."""


class Sized(Protocol):
    """A picture, of which only the size matters here."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""


def picture_rules(folder: Path) -> PictureRules | None:
    """Return the rules of the model in `folder`; None if its config has no pictures. No process is started yet.

    Raises:
        OSError, ValueError: the folder has no readable `config.json`.
    """
    config = read_model_config(folder)
    return None if placeholder_id(config) is None else PictureRules(folder)


class PictureRules:
    """Texts of pictures for the model in `folder`. For any thread.

    Raises:
        PictureRulesError: (by every member) the folder lacks files that the answer needs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._texts: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._model: _Model | None = None
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def token_id(self) -> int:
        """Id of the token that is replaced by a picture's rows."""
        return self._known().token_id

    @property
    def marker(self) -> str:
        """Text that the chat template writes once for a picture."""
        return self._known().marker

    def text(self, picture: Sized) -> str:
        """Return the text that replaces the marker of `picture` in a prompt."""
        with self._lock:
            text = self._texts.get(picture.size)
            if text is None:
                text = self._texts[picture.size] = str(self._asked(picture.size)["text"])
            self._texts.move_to_end(picture.size)
            if len(self._texts) > KNOWN_SIZES:
                self._texts.popitem(last=False)
        return text

    def rows(self, picture: Sized) -> int:
        """Return the number of placeholders in the text of `picture`."""
        return self.text(picture).count(self._known().placeholder)

    def close(self) -> None:
        """End the process, if it was started."""
        with self._lock:
            self._end()

    def _known(self) -> _Model:
        with self._lock:
            if self._model is None:
                self._start()
            assert self._model is not None
            return self._model

    def _asked(self, size: tuple[int, int]) -> dict[str, Any]:
        for _ in range(2):  # the process may have ended, idle, just before the request
            child = self._child
            if child is None or child.poll() is not None:
                child = self._start()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(size) + "\n")
                child.stdin.flush()
                return self._answer(child)
            except (BrokenPipeError, EOFError):
                self._end()
        raise PictureRulesError(f"{self._folder}: the process that reads pictures' sizes in ended twice")

    def _start(self) -> subprocess.Popen[str]:
        self._end()
        command = [sys.executable, "-m", "asyncrl.models.picture_rules", str(self._folder)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._child = child
        try:
            self._model = _Model(**self._answer(child))
        except (EOFError, PictureRulesError) as error:
            code = self._end()
            what = f"it ended with exit code {code}" if isinstance(error, EOFError) else str(error)
            raise PictureRulesError(f"{self._folder}: pictures cannot be used with this model: {what}") from None
        return child

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        line = self._line(child)
        answer: dict[str, Any] | None = None
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
        if not isinstance(answer, dict):
            self._end()  # its next line would be taken for the answer to the next request
            raise PictureRulesError(
                f"{self._folder}: the process for pictures printed what is not a reply: {line[:80]!r}"
            )
        if "error" in answer:
            raise PictureRulesError(str(answer["error"]))
        return answer

    def _line(self, child: subprocess.Popen[str]) -> str:
        """Return the output of the process up to the end of a line."""
        assert child.stdout is not None
        output, line = child.stdout.fileno(), b""
        ready = select.poll()
        ready.register(output, select.POLLIN)
        until = time.monotonic() + ANSWER_S
        while not line.endswith(b"\n"):
            if not ready.poll(1000.0 * max(0.0, until - time.monotonic())):
                self._end()
                raise PictureRulesError(f"{self._folder}: no answer on a picture's size within {ANSWER_S:g} s")
            if not (more := os.read(output, 1 << 16)):
                raise EOFError
            line += more
        return line.decode(errors="replace")

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            return child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def _leave_to_parent(self) -> None:
        """In a forked child, forget the process, which belongs to the parent."""
        self._lock = threading.Lock()
        child, self._child = self._child, None
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()
            child.returncode = 0


@dataclass(frozen=True, slots=True)
class _Model:
    token_id: int
    marker: str
    placeholder: str


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
        from PIL import Image  # an extra

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
    module_name = vars(importlib.import_module("transformers"))["_class_to_module"].get(name)
    if name is None or module_name is None:
        raise PictureModelError(f"transformers has no processor for {kind!r} in {folder}")
    try:
        module = _imported(f"transformers.{module_name}")  # past the stand-in that wants torchvision, for videos
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


class _KeepOut:
    """An import hook that hides torch, as if it were not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Hide torch, and leave other modules to other finders."""
        if name.partition(".")[0] in _KEPT_OUT:
            raise ModuleNotFoundError(f"{name} is kept out of this process", name=name)
        return None


def keep_torch_out() -> None:
    """Hide torch from transformers in this process."""
    find = importlib.util.find_spec
    sys.meta_path.insert(0, _KeepOut())
    importlib.util.find_spec = lambda name, package=None: (  # transformers calls it before it imports
        None if name.partition(".")[0] in _KEPT_OUT else find(name, package)
    )


def _send(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(folder: str) -> None:
    """Answer requests until the input ends."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    keep_torch_out()
    try:
        processor = PictureProcessor.of(Path(folder))
    except Exception as error:
        return _send({"error": f"{type(error).__name__}: {error}"})
    _send({"marker": processor.marker, "placeholder": processor.placeholder, "token_id": processor.token_id})
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        width, height = json.loads(line)
        try:
            _send({"text": processor.text_of_size(width, height)})
        except Exception as error:  # raised by a model's own code; its message gives the reason
            _send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1])
