"""Your reward: what an answer is worth."""

from collections.abc import Mapping
from typing import Any

from asyncrl.api import verdict


@verdict  # it says right (1) or wrong (0), so that evaluations report accuracy
def score(data: Mapping[str, Any], completion: str) -> float:
    """1 where the number behind the answer's `#` is `data["answer"]`; `data` is the row, `completion` the answer."""
    _, _, result = completion.partition("#")
    return float(result.strip() == data["answer"])
