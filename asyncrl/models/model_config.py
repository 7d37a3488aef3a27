"""Read the `config.json` of a model folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of `config.json` in the model folder `folder`; `~` is the home directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object.
    """
    found = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
