"""New rows of a growing JSON-lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonlTail:
    """Reads whole lines appended to `file` since the last `read`; the file may not exist yet, or be cut shorter."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The rows that are new.

        Raises:
            ValueError: a line is no JSON.
        """
        if not self._file.exists():
            return []
        with self._file.open("rb") as stream:
            if stream.seek(0, 2) < self._offset:
                self._offset = 0
            stream.seek(self._offset)
            data = stream.read()
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except RecursionError as error:
            raise ValueError(f"{self._file}: {error}") from error
