"""What a filter or a shaping function sees of a group, and a filter's verdict. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class GroupView:
    """The finished samples of one prompt: arrays of shape [S], lengths in generated tokens.

    Raises:
        ValueError: the arrays differ in length or are empty.
    """

    rewards_S: NDArray[np.float64]
    lengths_S: NDArray[np.int64]
    truncated_S: NDArray[np.bool_]

    def __post_init__(self) -> None:
        shapes = {self.rewards_S.shape, self.lengths_S.shape, self.truncated_S.shape}
        if len(shapes) != 1 or self.rewards_S.ndim != 1 or self.rewards_S.size == 0:
            raise ValueError(f"GroupView arrays have shapes {sorted(shapes)}; give one value per sample, at least one")


@dataclass(frozen=True)
class Verdict:
    """Whether a group is trained; if not, for which counted reason, and whether its prompt goes back to the dataset."""

    keep: bool
    reason: str = ""
    return_prompt: bool = False
