"""The text that represents a picture in a model's prompts, for processes without torch.

The model's processor decides, only from the picture's size, how many tokens a picture takes and which text is around
and between them. So a separate process with the processor but without torch (`picture_rules_child`) gets one request
for each size. It ends if there are no more requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from asyncrl.models.model_config import read_model_config

ANSWER_S: Final = 120.0
"""Longest wait for an answer: the first one takes some seconds of imports, and many on a busy machine."""
KNOWN_SIZES: Final = 1024
"""Number of sizes whose texts are cached: the text of a large picture has some 10 kB."""
TOKEN_FIELDS: Final = ("image_token_id", "image_token_index")
"""Fields of a config that may hold the placeholder's id."""


class PictureRulesError(ValueError):
    """The model in a folder does not accept a picture; the message says why."""


class Sized(Protocol):
    """A picture, of which only the size matters here."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""


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
        command = [sys.executable, "-m", "asyncrl.models.pictures.picture_rules_child", str(self._folder)]
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


def picture_rules(folder: Path) -> PictureRules | None:
    """Return the rules of the model in `folder`; None if its config has no pictures. No process is started yet.

    Raises:
        OSError, ValueError: the folder has no readable `config.json`.
    """
    config = read_model_config(folder)
    return None if placeholder_id(config) is None else PictureRules(folder)


def placeholder_id(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that is replaced by a picture's rows, from the content of `config.json`, or None."""
    if "vision_config" not in config:
        return None
    return next((int(config[name]) for name in TOKEN_FIELDS if config.get(name) is not None), None)


def placeholder_in(folder: str | Path) -> int | None:
    """As `placeholder_id`, for the model in `folder`; None also if its `config.json` cannot be read."""
    try:
        return placeholder_id(read_model_config(folder))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
