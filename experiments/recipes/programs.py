"""The reward of `pi_agent.yaml`, `mini_swe_agent.yaml` and `claude_code.yaml`: the right number is in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def right_number(prompt: Any, folder: Path) -> float:
    """1 if `answer.txt` in the program's folder has one number, that of the row's `answer` after `####`, else 0."""
    file = folder / "answer.txt"
    if not file.is_file():
        return 0.0
    right = prompt.data["answer"].rpartition("####")[2].strip()
    return float(re.findall(r"-?[\d,]*\.?\d+", file.read_text(errors="replace")[:1000]) == [right])
