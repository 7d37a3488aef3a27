"""A user's own data: one JSON object per line.

The prompt is the field `prompt`, `question` or `problem`; every other field is kept for the reward. Demonstrations for
supervised training are the field `completion`, `response` or `answer`. GSM8K files work as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

JSONL = ".jsonl"
"""What the name of such a file ends in."""
PROMPT_FIELDS = ("prompt", "question", "problem")
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
"""JSON can escape what no encoding can hold, and so no tokenizer can take."""
COMPLETION_FIELDS = ("completion", "response", "answer")


class JsonlDataset:
    """The rows of a JSONL file.

    Args:
        path: the file.
        split: `train` or `held_out`. With `held_out_share` 0 the split is the whole file (give evaluation a file of its
            own); above 0 a hash of the prompt puts that share of the prompts in `held_out` and the rest in `train`.
        held_out_share: share of the prompts held out, 0 to 1.
        prompt_template: text around the prompt, as in `"{prompt}\\nThink step by step."`; `{field}` of any field.
        limit: rows kept, from the top; 0: all.
        seed: unused, a file has one order; the run's seed orders the epochs.

    Raises:
        ValueError: the file cannot be read, a line is no JSON object or has no prompt (names file and line), or no row
            is left.
    """

    def __init__(
        self,
        *,
        path: str,
        split: str = "train",
        seed: int = 0,
        held_out_share: float = 0.0,
        prompt_template: str = "{prompt}",
        limit: int = 0,
    ) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"dataset split is {split!r}: choose 'train' or 'held_out'")
        if not 0.0 <= held_out_share < 1.0:
            raise ValueError(f"dataset held_out_share is {held_out_share}: give 0 to less than 1")
        self.path = Path(path).expanduser()
        lines = self._lines()
        rows = [self._parse(line, number, prompt_template) for number, line in lines]
        kept: Sequence[int] = range(len(rows))
        if held_out_share > 0.0:
            held_out = split == "held_out"
            kept = [index for index in kept if _is_held_out(rows[index]["prompt"], held_out_share) == held_out]
        kept = kept[:limit] if limit else kept
        self._rows = [rows[index] for index in kept]
        self.line_numbers = [lines[index][0] for index in kept]
        """By row, the line that it stands on, from 1."""
        self.line_sums = np.array([crc32(lines[index][1].encode()) for index in kept], np.uint32)
        """`[N]`: CRC-32 of each row's line."""
        if not self._rows:
            share = f" in split {split!r} with held_out_share={held_out_share}" if held_out_share else ""
            raise ValueError(f"{self.path} has no rows{share}: write one JSON object per line, at least one a split")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` (text, templated) and the line's own fields."""
        return self._rows[index]

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """The completion that supervised training imitates.

        Raises:
            ValueError: the row has none of `COMPLETION_FIELDS`.
        """
        for name in COMPLETION_FIELDS:
            if name in row:
                return str(row[name])
        names = ", ".join(COMPLETION_FIELDS)
        raise ValueError(f"{self.path}: the row with prompt {row['prompt'][:60]!r} has none of the fields {names}")

    def _lines(self) -> list[tuple[int, str]]:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            reason = f"{self.path} cannot be read ({error.strerror})"
            raise ValueError(f"{reason}: give a file, JSON lines, that this user may read") from error
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            number = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{self.path}:{number} is not UTF-8 ({error.reason}): save the file as UTF-8") from None
        return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]

    def _parse(self, line: str, number: int, template: str) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}:{number} is not JSON ({error}): write one object per line") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{self.path}:{number} is a JSON {type(fields).__name__}: write one object per line")
        prompt = next((fields[name] for name in PROMPT_FIELDS if name in fields), None)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"{self.path}:{number} has no text in any of the fields {', '.join(PROMPT_FIELDS)}: add one of them"
            )
        if (half := _HALF_OF_A_PAIR.search(prompt)) is not None:
            raise ValueError(
                f"{self.path}:{number} is no text: its prompt has {half[0]!a}, half of a pair of surrogates, after "
                f"{prompt[: half.start()][-20:]!a}; write the whole character"
            )
        try:
            return {**fields, "prompt": template.format(**{**fields, "prompt": prompt})}
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{self.path}:{number} does not fit prompt_template={template!r} ({type(error).__name__}: {error}): "
                "name fields that every line has, and write {{ and }} for braces"
            ) from None


def _is_held_out(prompt: str, share: float) -> bool:
    return crc32(prompt.encode()) < share * 2**32
