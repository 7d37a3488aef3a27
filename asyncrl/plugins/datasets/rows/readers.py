"""Readers of data files: JSON lines, Parquet, folders of them, and what Hugging Face `datasets` saves to disk.

Each yields `Record`s in the order of the files' content, and the files of a folder in the order of their names. Parquet
and Arrow are read by pyarrow, of the extra `data`; columns become plain Python values.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

JSONL, PARQUET = ".jsonl", ".parquet"
"""Suffixes of supported files."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets` writes beside a saved dataset's Arrow files, and above the folders of several splits."""


_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON can escape it, but no encoding, tokenizer or message can represent it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file: its content, its place (file and number, from 1), and a checksum of its content."""

    fields: dict[str, Any]
    place: str
    sum: int


def is_data_path(path: str) -> bool:
    """True if `path` is a folder or, by its name, a supported file."""
    return path.endswith((JSONL, PARQUET)) or Path(path).expanduser().is_dir()


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
