"""Messages with pictures: their content in any usual form, and the places of pictures in rendered text and token ids.

The content of a message is text, or a list of parts in the form of OpenAI (`image_url`, `input_image`), Anthropic
(`source`), MCP (`data`) or transformers (`image`, `path`, `url`). This module converts it to text if no part is a
picture, and otherwise to a list of `{"type": "text", "text": str}` and `{"type": "image", "image": Picture}`.

A dataset's row may have its pictures in a separate column, `images` or `image`. They replace, in order, `<image>` in
its texts or parts `{"type": "image"}` without content. Without such places they come before the text of the first
user's message. A picture of a row is a `PictureSource` until the row is used.

A chat template writes a marker for each picture. In the rendered text `expanded` replaces it by the model's
placeholders, one for each embedding row of the picture; `placed` finds them among the ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncrl.api.chat import Message
from asyncrl.api.generation import Prompt
from asyncrl.api.picture import Picture, PictureError, PlacedPicture, check_count, picture_from
from asyncrl.data.settings import IMAGE_FIELDS

Content = str | list[dict[str, Any]]

PLACEHOLDER = "<image>"
"""Stands for a picture in the text of a row that has such a column."""
PICTURE_TYPES = ("image", "image_url", "input_image")
_VALUES = ("image", "image_url", "source", "url", "path", "data", "base64", "bytes")
"""Keys under which a part has its picture."""


class PictureRules(Protocol):
    """A model's rules for pictures in prompts."""

    @property
    def token_id(self) -> int:
        """Id of a placeholder."""
        ...

    @property
    def marker(self) -> str:
        """Text that the chat template writes for a picture."""
        ...

    def text(self, picture: Picture) -> str:
        """Return the text that replaces the marker: the placeholders, and the text that the model needs around them."""
        ...

    def rows(self, picture: Picture) -> int:
        """Return the number of placeholders of a picture."""
        ...


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture of a row, not read yet: a file, its content, or a value that `picture_from` takes."""

    value: Any

    def picture(self) -> Picture:
        """Load the picture.

        Raises:
            PictureError: it cannot be used.
        """
        return Picture.from_path(self.value) if isinstance(self.value, Path) else picture_from(self.value)

    def __str__(self) -> str:
        if isinstance(self.value, str | Path):
            return str(self.value)
        if isinstance(self.value, bytes):
            return hashlib.sha256(self.value).hexdigest()
        return type(self.value).__qualname__


def content_of(content: Any) -> Content:
    """Return the content of a message in this module's form; None is no text.

    Raises:
        PictureError: a part is neither text nor a picture, a picture cannot be used, or there are too many.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PictureError(f"the content of a message is a {type(content).__name__}: give text, or a list of parts")
    check_count(sum(isinstance(part, Mapping) and part.get("type") in PICTURE_TYPES for part in content))
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        found = _part(part, number)
        if isinstance(found, Picture):
            parts.append({"type": "image", "image": found})
        elif parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + found}
        else:
            parts.append({"type": "text", "text": found})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part["type"] != "text" or part["text"]]


def with_content(message: Message) -> dict[str, Any]:
    """Return `message` with its content in this module's form.

    Raises:
        PictureError: as for `content_of`.
    """
    if message.get("content") is None and message.get("role") != "assistant":
        return dict(message)
    return {**message, "content": content_of(message.get("content"))}


def _part(part: Any, number: int) -> str | Picture:
    if isinstance(part, Mapping):
        if part.get("type") in PICTURE_TYPES:
            try:
                return _picture(part)
            except PictureError as error:
                raise PictureError(f"part {number} of a message: {error}") from None
        if isinstance(part.get("text"), str):
            return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PictureError(f"part {number} of a message is {kind!r}: text and pictures are supported, no sounds or videos")


def _picture(part: Mapping[str, Any]) -> Picture:
    value = _value(part)
    if isinstance(value, PictureSource):
        return value.picture()
    if value is None:
        raise PictureError("a picture without content: give image_url, source or image")
    if part.get("type") == "image" and value is part.get("data") and isinstance(value, str):  # MCP's
        return Picture.from_base64(value)
    return picture_from(value)


def _value(part: Mapping[str, Any]) -> Any:
    """Return the picture's value in `part`; None if it has none."""
    value = next((part[key] for key in _VALUES if part.get(key) is not None), None)
    if not isinstance(value, Mapping):
        in_base64 = isinstance(value, str) and value is part.get("base64")
        return Picture.from_base64(str(value)) if in_base64 else value
    data = value.get("data")
    if "sha256" in value and isinstance(data, bytes):  # a Picture that another process sent
        return Picture.received(data, value["sha256"])
    if value.get("type") == "base64" and isinstance(data, str):
        return Picture.from_base64(data)
    if isinstance(value.get("bytes"), bytes):  # a Hugging Face image column
        return value["bytes"]
    return next((value[key] for key in ("url", "path") if isinstance(value.get(key), str)), None) or _unknown(value)


def _unknown(value: Mapping[str, Any]) -> Any:
    raise PictureError(f"a picture has the keys {', '.join(map(str, value))}: give url, data in base64, or bytes")


def is_picture(value: Any) -> bool:
    """True if `value` is meant as a picture: uint8 `[height, width, 3]`, a PIL image, or a `Picture`, possibly in the
    form that another process sent.
    """
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3
    if isinstance(value, Mapping):
        return value.keys() == {"data", "sha256"}
    return isinstance(value, Picture) or type(value).__module__.startswith("PIL.")


def observed(value: Any) -> Content:
    """Convert an environment's observation to content: a picture, a list of parts, or text.

    Raises:
        PictureError: a picture cannot be used.
    """
    if is_picture(value):
        return content_of([{"type": "image", "image": value}])
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return content_of(value)
    return str(value)


def joined(*contents: Content) -> Content:
    """Concatenate contents."""
    return content_of(
        [part for each in contents for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)]
    )


def pictures_of(messages: Sequence[Message]) -> Iterator[Any]:
    """Yield the pictures of messages in this module's form, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["image"] for part in content if part.get("type") == "image")


def without_pictures(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return `messages` as plain data for a chat template, with each picture as a part without content."""
    return [
        {**turn, "content": [{"type": "image"} if part["type"] == "image" else part for part in turn["content"]]}
        if isinstance(turn.get("content"), list)
        else dict(turn)
        for turn in messages
    ]


def wrong_parts(content: Sequence[Any]) -> str | None:
    """Return why a list is not valid content in this module's form; None if it is. A picture may be a
    `PictureSource`.
    """
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part["text"], str):
            continue
        if kind != "image" or not isinstance(part.get("image"), Picture | PictureSource):
            return f"part {number} is {kind!r}: give text or pictures; sounds and videos are not supported"
    return None if content else "an empty list of parts"


def wrong_messages(messages: Any) -> str | None:
    """Return why `messages` is not a prompt, whose answer follows a user or a tool; None if it is."""
    if (wrong := wrong_turns(messages)) is None and messages[-1]["role"] in ("system", "assistant"):
        return f"it ends with the role {messages[-1]['role']!r}: the model answers a user or a tool"
    return wrong


def wrong_turns(messages: Any) -> str | None:
    """Return why `messages` is not a conversation; None if it is."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        return "it is no list of messages"
    for number, turn in enumerate(messages):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            return f"message {number} is not an object with a role"
        if isinstance(turn.get("content"), list):
            if (wrong := wrong_parts(turn["content"])) is not None:
                return f"message {number} has under 'content' {wrong}"
        elif not isinstance(turn.get("content"), str) and not turn.get("tool_calls"):
            return f"message {number} has no text under 'content'"
    return None


def expanded(text: str, pictures: Sequence[Picture], rules: PictureRules | None) -> str:
    """Replace each picture's marker in a rendered text by its placeholders.

    Raises:
        PictureError: the model takes no pictures, the template shows another number of them, or there are too many.
    """
    if rules is None:
        if pictures:
            raise PictureError("it has pictures, and the model takes none")
        return text
    check_count(len(pictures))
    pieces = text.split(rules.marker)
    if len(pieces) - 1 != len(pictures):
        raise PictureError(
            f"the chat template writes {rules.marker!r} {len(pieces) - 1} times for {len(pictures)} pictures: it needs "
            "one for each (dataset.chat_template), and none in a message's text"
        )
    if not pictures:
        return text
    return pieces[0] + "".join(rules.text(picture) + piece for picture, piece in zip(pictures, pieces[1:], strict=True))


def placed(ids: Sequence[int], pictures: Sequence[Picture], rules: PictureRules | None) -> tuple[PlacedPicture, ...]:
    """Return the spans of `pictures` in `ids`, the tokens of an expanded text.

    Raises:
        PictureError: there are more or fewer placeholders than the pictures have rows.
    """
    if rules is None or not pictures:
        return ()
    offsets = [position for position, token in enumerate(ids) if token == rules.token_id]
    counts = [rules.rows(picture) for picture in pictures]
    if len(offsets) != sum(counts):
        raise PictureError(
            f"the tokenizer makes {len(offsets)} placeholders (id {rules.token_id}) of {len(pictures)} pictures, which "
            f"have {sum(counts)} rows: this tokenizer is not the model's"
        )
    found = []
    for picture, count in zip(pictures, counts, strict=True):
        own, offsets = offsets[:count], offsets[count:]
        found.append(PlacedPicture(own[0], own[-1] - own[0] + 1, picture))
    return tuple(found)


def check_prompt_pictures(prompt: Prompt, ids: Sequence[int], pictures: Sequence[PlacedPicture]) -> None:
    """Check that a request or a sample that begins with the prompt's tokens also has the prompt's pictures.

    Raises:
        ValueError: it lacks pictures, so the model would read their placeholders as words.
    """
    if not prompt.pictures or tuple(ids[: len(prompt.input_ids)]) != prompt.input_ids:
        return
    if tuple(pictures[: len(prompt.pictures)]) != prompt.pictures:
        raise ValueError(
            f"prompt {prompt.prompt_id} has {len(prompt.pictures)} pictures, and what begins with its input_ids has "
            "others: give GenerationRequest.pictures and Sample.pictures what Prompt.pictures has"
        )


def prompt_with_pictures(row: Mapping[str, Any], folder: Path | None = None) -> str | list[dict[str, Any]]:
    """Return the prompt of a row, with its pictures in their places as `PictureSource`s; text without pictures stays
    text.

    Args:
        row: `prompt`, and possibly pictures in a column of their own.
        folder: paths of pictures are relative to it and may not lead out of it; None if there are no paths.

    Raises:
        PictureError: a path leads out of the folder or is a URL, the number of pictures is not the number of places, or
            there are too many.
    """
    prompt = row["prompt"]
    column = next((row[name] for name in IMAGE_FIELDS if _has(row.get(name))), None)
    pictures = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
    if not pictures and (isinstance(prompt, str) or not any(_has_parts(turn) for turn in prompt)):
        return prompt if isinstance(prompt, str) else list(prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    left = [_source(picture, folder) for picture in pictures]
    made = [_placed_in(turn, left, folder, marked=bool(pictures)) for turn in messages]
    if left and len(left) < len(pictures):
        raise PictureError(f"there are {len(pictures)} pictures and {len(pictures) - len(left)} placeholders for them")
    if left:
        first = next((n for n, turn in enumerate(made) if isinstance(turn, Mapping) and turn.get("role") == "user"), 0)
        parts = [{"type": "image", "image": picture} for picture in left]
        content = made[first].get("content")
        text = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        made[first] = {**made[first], "content": [*parts, *text]}
    check_count(sum(1 for _ in pictures_of([turn for turn in made if isinstance(turn, Mapping)])))
    return made


def _has(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | bytes | list | tuple) and not value)


def _has_parts(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("content"), list)


def _source(value: Any, folder: Path | None) -> PictureSource:
    if isinstance(value, PictureSource):
        return value
    if isinstance(value, Mapping):
        value = _value({"image": value})
    if not isinstance(value, str) or value.startswith("data:"):
        return PictureSource(value)
    if "://" in value:
        raise PictureError(f"the picture {value[:80]!r} is a URL, and nothing is fetched: give a path, or a data URL")
    if folder is None:
        raise PictureError(f"the picture {value[:80]!r} is a path, which only a data file's rows may name")
    path, inside = (folder / value).resolve(), folder.resolve()
    if not path.is_relative_to(inside):
        raise PictureError(f"the picture {value[:200]!r} is outside of the data's folder {inside}")
    return PictureSource(path)


def _placed_in(turn: Any, left: list[PictureSource], folder: Path | None, *, marked: bool) -> Any:
    """Return a message with its places filled by pictures taken from `left`."""
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if isinstance(content, str):
        if not marked or PLACEHOLDER not in content:
            return turn
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return turn
    parts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in PICTURE_TYPES:
            value = _value(part)
            parts.append({"type": "image", "image": _next(left) if value is None else _source(value, folder)})
        elif isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            pieces = text.split(PLACEHOLDER) if marked else [text]
            for number, piece in enumerate(pieces):
                if number:
                    parts.append({"type": "image", "image": _next(left)})
                if piece:
                    parts.append({"type": "text", "text": piece})
        else:
            parts.append(part)
    if parts and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return {**turn, "content": "".join(part["text"] for part in parts)}
    return {**turn, "content": parts}


def _next(left: list[PictureSource]) -> PictureSource:
    if not left:
        raise PictureError("there are more placeholders for pictures than pictures")
    return left.pop(0)
