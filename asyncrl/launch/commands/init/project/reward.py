"""Your reward: the score of an answer."""

from collections.abc import Mapping
from typing import Any

from asyncrl.api import verdict


@verdict  # it returns 1 (right) or 0 (wrong), so evaluations report accuracy
def score(data: Mapping[str, Any], completion: str) -> float:
    """Return 1 if the number after the answer's `#` is `data["answer"]`. `data` is the row, `completion` the answer."""
    _, _, result = completion.partition("#")
    return float(result.strip() == data["answer"])
