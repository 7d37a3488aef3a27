"""A question, an answer, a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api import Environment, RewardFunction, StepResult, scored


class SingleTurnEnv(Environment):
    """`reset` returns the row's prompt; `step` scores the answer's text and ends the episode.

    Args:
        reward: the function of the setting `reward.path`.
    """

    def __init__(self, *, reward: RewardFunction) -> None:
        self._reward = reward
        self._data: Mapping[str, Any] | None = None

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, Mapping[str, Any]]:
        """Take the row in `options["data"]`; returns its prompt's text."""
        if options is None or "data" not in options:
            raise ValueError("SingleTurnEnv.reset needs options={'data': row}")
        self._data = options["data"]
        return text_of_prompt(options["data"]["prompt"]), {}

    async def step(self, action: Any) -> StepResult:
        """Score answer text `action`. The group's answers may follow each other after one `reset`."""
        if self._data is None:
            raise RuntimeError("SingleTurnEnv.step before reset")
        return "", await scored(self._reward, self._data, str(action)), True, False, {}


def text_of_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a row's prompt: if it is messages, that of the last one of the user."""
    if isinstance(prompt, str):
        return prompt
    content = next((turn.get("content") for turn in reversed(prompt) if turn.get("role") == "user"), None)
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part, Mapping) and part.get("type") == "text")
