"""One prompt as an agent receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.api.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the dataset, made ready for an agent.

    `data` is the dataset's own row (for the built-in agents: `prompt` text and what the reward needs); `input_ids` its
    tokenised prompt; `group_size` the number of samples wanted; `sampling` the settings of the experiment, with the
    seed of this prompt.
    """

    prompt_id: str
    order: int
    data: Mapping[str, Any]
    input_ids: tuple[int, ...]
    group_size: int
    sampling: SamplingParams
