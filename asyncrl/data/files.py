"""A user's own data: rows of JSON lines, of Parquet, of folders of them, and of what Hugging Face `datasets` saves.

The prompt is the field `prompt`, `question`, `problem` or `messages`, text or a list of messages; every other field is
kept for the reward. Pictures are the field `images` or `image`, or parts of messages (`picture_parts`); paths are
relative to the data's folder. Demonstrations for supervised training are the field `completion`, `response` or
`answer`. GSM8K files work as they are.

Rows are in the order of the files' content, and the files of a folder in the order of their names. Parquet and Arrow
are read by pyarrow, of the extra `data`; columns become plain Python values.
"""

from __future__ import annotations

import errno
import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.chat import Message
from asyncrl.api.picture import PictureError
from asyncrl.data.picture_parts import prompt_with_pictures, wrong_messages
from asyncrl.data.settings import IMAGE_FIELDS, JSONL, PARQUET
from asyncrl.data.tokenizers import common_length

PROMPT_FIELDS = ("prompt", "question", "problem", "messages")
COMPLETION_FIELDS = ("completion", "response", "answer")
_UNCHANGED = "{prompt}"
CHOSEN, REJECTED = "chosen", "rejected"


class FileDataset:
    """The rows of a JSONL or Parquet file, of a folder of them, or of a folder that `datasets` saved to disk.

    Args:
        path: the file or folder.
        split: `train` or `held_out`. With `held_out_share` 0 either split is the whole file, so evaluation needs a
            separate file. Above 0 a hash of the prompt puts that share of the prompts in `held_out` and the rest in
            `train`.
        held_out_share: share of the prompts held out, 0 to 1.
        prompt_template: text around a prompt that is text, as in `"{prompt}\\nThink step by step."`; `{field}` of any
            field.
        limit: number of first rows that are kept; 0: all.
        files: glob pattern of the files of a folder, as in `"main/train-*"`; empty: all of them.
        fields: renamed columns, by the name that asyncrl and the reward use. A nested column is named with a dot:
            `answer: reward_model.ground_truth`.
        demonstrations: for supervised training: messages may end with the assistant's.
        pairs: for preference training: a row without a prompt gets the common beginning of `chosen` and `rejected` as
            its prompt.
        seed: unused, because a file has one order; the run's seed orders the epochs.

    Raises:
        ValueError: the file cannot be read, a row is no object, has no prompt or not a column that `fields` names, or
            a picture outside of the data's folder (names file and line), or no row is left.
    """

    def __init__(
        self,
        *,
        path: str,
        split: str = "train",
        seed: int = 0,
        held_out_share: float = 0.0,
        prompt_template: str = _UNCHANGED,
        limit: int = 0,
        files: str = "",
        fields: Mapping[str, str] | None = None,
        demonstrations: bool = False,
        pairs: bool = False,
    ) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"dataset split is {split!r}: choose 'train' or 'held_out'")
        if not 0.0 <= held_out_share < 1.0:
            raise ValueError(f"dataset held_out_share is {held_out_share}: give 0 to less than 1")
        self.path = Path(path).expanduser()
        self._fields = dict(fields or {})
        self._demonstrations, self._pairs = demonstrations, pairs
        records = read(self.path, files)
        rows = [self._row(record, prompt_template) for record in records]
        kept: Sequence[int] = range(len(rows))
        if held_out_share > 0.0:
            held_out = split == "held_out"
            kept = [index for index in kept if _is_held_out(rows[index]["prompt"], held_out_share) == held_out]
        kept = kept[:limit] if limit else kept
        self._rows = [rows[index] for index in kept]
        self._locations = [records[index].location for index in kept]
        self._sums = np.array([records[index].sum for index in kept], np.uint32)
        if not self._rows:
            share = f" in split {split!r} with held_out_share={held_out_share}" if held_out_share else ""
            raise ValueError(f"{self.path} has no rows{share}: write one JSON object per line, at least one a split")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` (text, templated, or messages) and the row's own fields."""
        return self._rows[index]

    def location(self, index: int) -> str:
        """Return the place of row `index`: file and line, or the number of the row in the file, from 1."""
        return self._locations[index]

    def sums(self) -> NDArray[np.uint32]:
        """`[N]`: CRC-32 of each row's content."""
        return self._sums

    def demonstration(self, row: Mapping[str, Any]) -> str | list[Message]:
        """Return the completion that supervised training imitates: text, or messages.

        Raises:
            ValueError: the row has none of `COMPLETION_FIELDS`, or nothing in it.
        """
        for name in COMPLETION_FIELDS:
            if name in row:
                found = row[name]
                if isinstance(found, list) and found:
                    return [without_none(turn) for turn in found]
                if not _is_plain(found):
                    raise ValueError(f"its {name!r} is {found!r:.60}: give each row an answer, or leave the row out")
                return str(found)
        names = ", ".join(COMPLETION_FIELDS)
        raise ValueError(f"the row with prompt {row['prompt'][:60]!r} has none of the fields {names}")

    def _row(self, record: Record, template: str) -> dict[str, Any]:
        fields, location = dict(record.fields), record.location
        for name, column in self._fields.items():
            try:
                fields[name] = _column(record.fields, column)
            except LookupError:
                raise ValueError(
                    f"{location} has no {column!r}, which dataset.fields.{name} names; "
                    f"it has: {', '.join(record.fields)}"
                ) from None
        found = next((name for name in PROMPT_FIELDS if fields.get(name) not in (None, "", [])), "")
        if self._pairs and not found:
            found, fields = "prompt", with_common_prompt(fields)
        prompt = fields.get(found)
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(
                f"{location} has no text in any of the fields {', '.join(PROMPT_FIELDS)}: add one of them, or name its "
                "column in dataset.fields.prompt"
            )
        shown = self._with_pictures(fields, prompt, template, location)
        if shown is not None:
            prompt, template = shown, _UNCHANGED
            fields = {name: value for name, value in fields.items() if name not in IMAGE_FIELDS}
        if isinstance(prompt, list):
            prompt = [without_none(turn) for turn in prompt]
            asked = prompt[:-1] if self._demonstrations and _is_answer(prompt[-1]) else prompt
            if (wrong := wrong_messages(asked)) is not None:
                raise ValueError(f"{location} has no messages under {found!r}: {wrong}")
            if template != _UNCHANGED:
                raise ValueError(
                    f"{location} has messages, where prompt_template={template!r} wants text: leave it out"
                )
        if not isinstance(prompt, str):
            return {**fields, "prompt": prompt}
        return {**fields, "prompt": self._templated(fields, prompt, template, location)}

    def _with_pictures(
        self, fields: Mapping[str, Any], prompt: str | list[Any], template: str, location: str
    ) -> list[dict[str, Any]] | None:
        """Return the row's messages with its pictures; None if it has none."""
        if isinstance(prompt, str) and not any(name in fields for name in IMAGE_FIELDS):
            return None
        if isinstance(prompt, str):
            prompt = self._templated(fields, prompt, template, location)
        folder = self.path if self.path.is_dir() else self.path.parent
        try:
            made = prompt_with_pictures({**fields, "prompt": prompt}, folder)
        except PictureError as error:
            raise ValueError(f"{location}: {error}") from None
        if isinstance(made, str) or not any(isinstance(turn, Mapping) and _has_pictures(turn) for turn in made):
            return None
        return made

    def _templated(self, fields: Mapping[str, Any], prompt: str, template: str, location: str) -> str:
        try:
            return prompt if template == _UNCHANGED else _PLAIN_FIELDS.format(template, **{**fields, "prompt": prompt})
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{location} does not fit prompt_template={template!r} ({type(error).__name__}: {error}): "
                "name fields that every line has, and write {{ and }} for braces"
            ) from None


def _is_plain(value: object) -> bool:
    """True for text and numbers, which have one form as text."""
    return isinstance(value, str) or (isinstance(value, Real | Decimal) and math.isfinite(value))


class _PlainFields(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if not _is_plain(value):
            raise ValueError(f"a field is {value!r:.60}, which is neither text nor a number")
        return str(super().format_field(value, format_spec))


_PLAIN_FIELDS = _PlainFields()


def _column(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value under `name`, or, with dots, a value within it.

    Raises:
        LookupError: there is no such value.
    """
    if name in fields or "." not in name:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise LookupError(part)
        value = value[part]
    return value


def with_common_prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `fields` of a pair without a prompt, with the common beginning of both answers as `prompt`.

    Text is cut where the answers first differ, before a space there, as TRL's `extract_prompt` does it.
    """
    chosen, rejected = fields.get(CHOSEN), fields.get(REJECTED)
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = common_length(chosen, rejected)
        end -= bool(end) and chosen[end - 1] == " "
    elif isinstance(chosen, list) and isinstance(rejected, list):
        end = max(0, min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    else:
        return dict(fields)
    return {**fields, "prompt": chosen[:end], CHOSEN: chosen[end:], REJECTED: rejected[end:]}


def without_none(turn: Any) -> Any:
    """Return a message without its empty fields: each row of a table has a value for every column."""
    return {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else turn


def _has_pictures(turn: Mapping[str, Any]) -> bool:
    content = turn.get("content")
    return isinstance(content, list) and any(isinstance(p, Mapping) and p.get("type") == "image" for p in content)


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == "assistant"


def _is_held_out(prompt: str | Sequence[Message], share: float) -> bool:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return crc32(text.encode()) < share * 2**32


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file: its content, its place (file and number, from 1), and a checksum of its content."""

    fields: dict[str, Any]
    location: str
    sum: int


def files_of(path: Path, files: str = "") -> list[Path]:
    """Return the files that `read` reads. For a folder that `datasets` saved, that includes the file that lists the
    others.

    Raises:
        ValueError: as for `read`.
    """
    if path.suffix in (JSONL, PARQUET) or not path.is_dir():
        return [path]
    named = [path / _STATE] if not files and (path / _STATE).is_file() else []
    return named + _files_of(path, files)


def read(path: Path, files: str = "") -> list[Record]:
    """Return the records of a file, or of a folder: those that `files`, a glob pattern, names; by default all data
    files.

    Raises:
        ValueError: it cannot be read, or has another format. The message names the place and the fix.
    """
    if path.suffix not in (JSONL, PARQUET) and path.is_dir():
        return [record for file in _files_of(path, files) for record in _read_file(file)]
    if files:
        raise ValueError(f"{path} is not a folder, so args.files={files!r} cannot choose files: leave it out")
    return list(_read_file(path))


_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets` writes beside a saved dataset's Arrow files, and above the folders of several splits."""


def _files_of(folder: Path, pattern: str) -> list[Path]:
    """Return the data files of `folder`, sorted."""
    if not pattern and (folder / _SPLITS).is_file():
        splits = _saved(folder / _SPLITS, "splits")["splits"]
        raise ValueError(f"{folder} holds the splits {', '.join(splits)}: give the folder of one, {folder / splits[0]}")
    if not pattern and (folder / _STATE).is_file():
        state = _saved(folder / _STATE, "_data_files")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError(f"{folder} keeps its order apart from its rows: save it after flatten_indices()")
        return [folder / file["filename"] for file in state["_data_files"]]
    found = sorted(folder.glob(pattern or "**/*"))
    chosen = [file for file in found if file.is_file() and file.suffix in (JSONL, PARQUET, ".arrow")]
    if not chosen:
        named = f" that args.files={pattern!r} names" if pattern else ""
        raise ValueError(f"{folder} has no data files{named}: give files that end in {JSONL}, {PARQUET} or .arrow")
    if len({file.suffix for file in chosen}) > 1 or (not pattern and len({file.parent for file in chosen}) > 1):
        names = ", ".join(str(file.relative_to(folder)) for file in chosen[:4])
        raise ValueError(f"{folder} holds several sets of files ({names}, ...): choose some by args.files='train-*'")
    return chosen


def _saved(path: Path, key: str) -> dict[str, Any]:
    """Read a map with `key` that `datasets` wrote to `path`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): save the dataset with save_to_disk again") from None
    if not isinstance(found, dict) or not isinstance(found.get(key), list) or not found[key]:
        raise ValueError(f"{path} is not what save_to_disk writes, it has no {key}: save the dataset again")
    return found


def _read_file(path: Path) -> Iterator[Record]:
    return _json_lines(path) if path.suffix == JSONL else _table(path)


_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON can escape it, but no encoding, tokenizer or message can represent it."""


def _json_lines(path: Path) -> Iterator[Record]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(errno.EINVAL, "it is a pipe or a device")  # which might never end
        data = path.read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise ValueError(f"{reason}: give a file, JSON lines, that this user may read") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{number} is not UTF-8 ({error.reason}): save the file as UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}): write one object per line") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path}:{number} is a JSON {type(fields).__name__}: write one object per line")
        if _ESCAPED_HALF.search(line) and (
            half := _HALF_OF_A_PAIR.search(whole := json.dumps(fields, ensure_ascii=False))
        ):
            raise ValueError(
                f"{path}:{number} is not text: it has {half[0]!a}, half of a pair of surrogates, after "
                f"{whole[: half.start()][-20:]!a}; write the whole character"
            )
        yield Record(fields, f"{path}:{number}", crc32(line.encode()))


def _table(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} needs the package pyarrow: pip install 'asyncrl[data]', or save the data as JSON lines"
        ) from None
    try:
        if path.suffix == PARQUET:
            table = pyarrow.parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                table = pyarrow.ipc.open_stream(source).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a whole Parquet or Arrow file") from None
    number = 0
    for batch in table.to_batches():
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} has text that is not UTF-8 ({error.reason}), after row {number}: save it as UTF-8"
            ) from None
        for fields in rows:
            number += 1
            content = json.dumps(fields, sort_keys=True, default=str).encode()
            yield Record(fields, f"{path}:{number}", crc32(content))
