"""The process behind `picture_rules`: runs a model folder's processor to get the text that represents a picture.

It reads lines of JSON, `[width, height]`, and answers each with one: `{"text": ...}` or `{"error": ...}`. Its first
output line describes the model: `{"marker", "placeholder", "token_id"}`, or `{"error": ...}`.

Torch is not imported: only Pillow's image processors are used, so the process takes some 90 MB instead of 400 and
starts in two seconds of CPU time. It ends with its input, or after a minute without a request.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

IDLE_S: Final = 60.0
_KEPT_OUT: Final = frozenset({"torch", "torchvision", "torchaudio"})


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
    from asyncrl.models.pictures.picture_processor import PictureProcessor

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
