"""Files and words of a program's episode: texts with placeholders, copies, and how what it leaves is removed.

In a text, `{base_url}`, `{root_url}` and `{api_key}` stand for the policy's address and key, `{row.<field>}` for a
field of the dataset's row, and `{brace}` for `{`. Braces around anything but one word stay as they are, as in JSON, and
so does `{{word}}`, as templates of other programs have it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

_log = logging.getLogger(__name__)
OF_SESSION: Final = ("base_url", "root_url", "api_key")
"""Placeholders that only the program gets, not its reward."""
_WORD: Final = re.compile(r"\{\{[A-Za-z_][\w.-]*\}\}|\{([A-Za-z_][\w.-]*)\}")


@dataclass(frozen=True, slots=True)
class Copied:
    """Content of a file without placeholders: a text, or a file or folder to copy."""

    source: str | Path


def text_of(what: str, given: object, known: Sequence[str]) -> str:
    """Return a setting's text, whose placeholders are known.

    Raises:
        ValueError: it is no text, or one is not.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str):
        raise ValueError(f"{what}={given!r:.80}: no text; put it in quotation marks")
    for found in _WORD.finditer(given):
        name = found[1]
        if name is not None and name not in (*known, "brace") and not name.startswith("row."):
            choices = ", ".join(f"{{{each}}}" for each in (*known, "row.<field>"))
            raise ValueError(f"{what}: no such placeholder: {found[0]}; there are {choices}; {{brace}} writes a brace")
    return given


def texts_of(what: str, given: object, known: Sequence[str]) -> list[str]:
    """Return the words of a command; raises as `text_of`."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(f"{what}={given!r:.80}: give a list, the program and its arguments")
    return [text_of(f"{what}[{number}]", word, known) for number, word in enumerate(given)]


def files_of(what: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, str | Copied]:
    """Return the contents of files, by name.

    Raises:
        ValueError: a name, a placeholder or a path is wrong.
    """
    found: dict[str, str | Copied] = {}
    for name, content in given.items():
        _check_name(f"{what}[{name}]", name.removeprefix("~/") if known else name)
        if not isinstance(content, Mapping):
            found[name] = text_of(f"{what}[{name}]", content, known)
            continue
        source = Path(str(content.get("path", ""))).expanduser().absolute()
        if set(content) != {"path"} or not source.exists():
            raise ValueError(f"{what}[{name}]={dict(content)}: give a text, or `path`: a file or folder to copy")
        found[name] = Copied(source)
    return found


def _check_name(what: str, name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"{what}: no name below the episode's folder; give a relative path without '..'")


def place_of(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in an episode's folder: below `home` if it begins with `~/`, else `work`.

    Raises:
        ValueError: it would be elsewhere.
    """
    below = name.removeprefix("~/")
    _check_name(repr(name), below)
    return folder / ("work" if below == name else "home") / below


def write(folder: Path, place: Path, content: str | Copied, values: Mapping[str, str], row: Mapping[str, Any]) -> None:
    """Write a file, or copy a folder, to `place` below `folder`, not through links that were copied there before.

    Raises:
        ValueError: as `filled`, or `place` is elsewhere, because a folder above it is a link.
    """
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{place.relative_to(folder)}: a link above it leads out of the episode's folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if isinstance(content, str):
        place.write_text(filled(content, values, row), encoding="utf-8")
    elif isinstance(content.source, str):
        place.write_text(content.source, encoding="utf-8", errors="surrogatepass")
    elif content.source.is_dir():
        shutil.copytree(content.source, place, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(content.source, place)


def filled(text: str, values: Mapping[str, str], row: Mapping[str, Any]) -> str:
    """Return `text` with its placeholders replaced.

    Raises:
        ValueError: the row has no such field.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name is None or name == "brace":
            return found[0] if name is None else "{"
        if not name.startswith("row."):
            return values[name]
        key = name.removeprefix("row.")
        if key not in row:
            raise ValueError(f"{found[0]}: the row has no field {key!r}; it has {', '.join(sorted(row))}")
        return row[key] if isinstance(row[key], str) else json.dumps(row[key], ensure_ascii=False)

    return _WORD.sub(value, text)


def remove(path: Path) -> None:
    """Remove a file or folder with all that it contains, folders that nobody may write to included.

    Only folders are opened: a pipe would wait for its other end, and a link leads elsewhere.
    """
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_folder:
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for folder, _, _ in os.walk(path):
            with suppress(OSError):
                os.chmod(folder, stat.S_IRWXU)
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _log.warning("%s cannot be removed, for want of rights", path)


def program_of(what: str, name: str, path: str | None) -> str:
    """Return the absolute path of the program that the setting `what` names.

    Raises:
        ValueError: there is no such program.
    """
    given = str(Path(name).expanduser())
    found = shutil.which(given, path=path)
    if found is None:
        raise ValueError(f"{what}={name!r}: no such program here; install it on each host, or give its path")
    return os.path.abspath(found)
