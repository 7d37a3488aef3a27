"""Rewards as plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Any callable with this signature; name it in `reward.path`. Called in a RolloutWorker, never in a training
    rank."""

    def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """The reward of answer text `completion` to dataset row `data`."""
        ...
