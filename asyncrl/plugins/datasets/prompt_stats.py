"""Statistics of a dataset's prompts before a run starts: lengths, rows without a valid prompt, and the first prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.plugins.datasets import Dataset
from asyncrl.plugins.datasets.prompt_format import (
    SHORTENED,
    InvalidPrompt,
    OverlongPrompt,
    PicturesRefused,
    PromptFormat,
)
from asyncrl.plugins.datasets.settings import Overlong

SHOWN_CHARACTERS = 2000
"""Characters of the first prompt that are shown: its beginning and end, which come from the template."""


@dataclass(frozen=True)
class PromptStats:
    """Findings in the first `looked_at` rows of a dataset's `rows`.

    Attributes:
        longest: tokens of the longest valid prompt, before any is shortened.
        longest_used: tokens of the longest prompt that is used, after shortening.
        bad: rows without a valid prompt for another reason than length, and rows before the first used prompt that are
            too long even when shortened.
        first_bad: reason why the first of these rows has no valid prompt.
        first: the first used prompt, its text and its number of tokens.
        tools: tokens of each prompt that describe the tools.
        highest: the highest token of valid prompts; -1 if there is none.
        mcp: True if tools of MCP servers, which are not known yet, will add to that.
    """

    rows: int
    looked_at: int
    longest: int
    longest_used: int
    overlong: int
    bad: int
    first_overlong: str
    first_bad: str
    first: tuple[str, int] | None
    tools: int = 0
    highest: int = -1
    mcp: bool = False

    def lines(self, max_tokens: int, overlong: Overlong) -> list[str]:
        """Return the findings as text."""
        of = "" if self.looked_at == self.rows else f" (of the first {self.looked_at})"
        found = [f"{self.rows} rows; prompts of up to {self.longest} tokens{of}"]
        if self.tools:
            found.append(f"{self.tools} tokens of each prompt are what the chat template says of the tools")
        if self.mcp:
            found.append("the tools of MCP servers come on top, and are counted once these are connected")
        if self.overlong:
            fate = f"cut ({overlong})" if overlong in SHORTENED else "left out"
            found.append(f"{self.overlong} are longer than dataset.max_prompt_tokens={max_tokens}: {fate}{of}")
        if self.bad:
            found.append(f"{self.bad} make no prompt and are left out{of}; {self.first_bad}")
        return found


def measure_prompts(dataset: Dataset, prompt_format: PromptFormat, limit: int | None = None) -> PromptStats:
    """Look at the first `limit` rows of `dataset` (None: all)."""
    rows = len(dataset)
    looked_at = rows if limit is None else min(rows, limit)
    unlimited = replace(prompt_format, max_tokens=None)
    longest = longest_used = overlong = bad = 0
    highest = -1
    first_overlong = first_bad = ""
    first: tuple[str, int] | None = None
    for number in range(looked_at):
        row = dataset.row(number)
        try:
            ids = unlimited.encode(row)
        except PicturesRefused as error:
            raise PicturesRefused(f"row {number}: {error}") from None
        except InvalidPrompt as error:
            bad += 1
            first_bad = first_bad or f"row {number}: {error}"
            continue
        length, highest = len(ids), max(highest, *ids)
        longest = max(longest, length)
        too_long = prompt_format.max_tokens is not None and length > prompt_format.max_tokens
        if not too_long or prompt_format.overlong in SHORTENED:
            longest_used = max(longest_used, min(length, prompt_format.max_tokens or length))
        if first is None and (not too_long or prompt_format.overlong in SHORTENED):
            try:
                prompt, rendered = prompt_format.fitted(row)
            except OverlongPrompt:
                bad += 1
                most = f"dataset.max_prompt_tokens={prompt_format.max_tokens}"
                first_bad = first_bad or f"row {number}: even without the user's text it is longer than {most}"
                continue
            first = prompt_format.rendered(prompt), len(rendered.ids)
        if too_long:
            overlong += 1
            first_overlong = first_overlong or f"row {number} has a prompt of {length} tokens"
    return PromptStats(
        rows=rows,
        looked_at=looked_at,
        longest=longest,
        longest_used=longest_used,
        overlong=overlong,
        bad=bad,
        first_overlong=first_overlong,
        first_bad=first_bad,
        first=first,
        tools=prompt_format.tool_tokens(),
        highest=highest,
    )


def shown(text: str) -> str:
    """Return `text`; a long text without its middle."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
