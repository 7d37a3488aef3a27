"""Rewards as plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Any callable with this signature; name it in `reward.path`. RolloutWorkers call it, training ranks never do."""

    def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """The reward of answer text `completion` to dataset row `data`."""
        ...
