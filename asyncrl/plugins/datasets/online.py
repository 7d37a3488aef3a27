"""Rows without content, for runs whose prompts come from outside (`asyncrl.rollout.online`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROWS = 1000


class OnlineRows:
    """As many places as clients want: each session of an online run takes the next row, which names its rollout in the
    ledger. The epochs, of a thousand rows, go on without an end.

    Args:
        split, seed: not needed.
    """

    def __init__(self, *, split: str = "train", seed: int = 0) -> None:
        pass

    def __len__(self) -> int:
        return ROWS

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index`, whose prompt nobody plays; any tokenizer knows it."""
        return {"prompt": "0"}
