"""A finished rollout: one prompt's group of samples, every token with its policy version and behaviour log-
probability."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence of a group. Every array is aligned with `tokens` and has shape `[T]`.

    T counts prompt, generated and environment tokens. Leave it unchanged once made: it is shared, not copied. (Not
    `frozen`, which would more than double the cost of making one, paid for every sample that crosses a socket.)

    Raises:
        ValueError: an array's length differs from that of `tokens`, or the sample is empty.
    """

    tokens: NDArray[np.int32]
    """Token ids."""
    loss_mask: NDArray[np.uint8]
    """1 where the policy generated the token, 0 for prompt and environment tokens."""
    behave_logprobs: NDArray[np.float32]
    """Natural-log probability of the token under the distribution really sampled from; 0 where not generated."""
    versions: NDArray[np.int32]
    """Policy version that generated the token; -1 where not generated."""
    reward: float
    truncated: bool = False
    """True where the answer was cut off by a length limit instead of ending itself."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0:
            raise ValueError("Sample.tokens is empty: a sample holds at least its prompt")
        # Compared outright, named only on failure: this runs for every sample that crosses a socket.
        if not self.loss_mask.shape == self.behave_logprobs.shape == self.versions.shape == (length,):
            names = ("loss_mask", "behave_logprobs", "versions")
            shapes = self.loss_mask.shape, self.behave_logprobs.shape, self.versions.shape
            name, shape = next(pair for pair in zip(names, shapes, strict=True) if pair[1] != (length,))
            raise ValueError(f"Sample.{name} has shape {shape}, expected ({length},) as Sample.tokens")

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest generated token; -1 if nothing was generated."""
        generated = self.versions[self.loss_mask.astype(bool)]
        return int(generated.min()) if generated.size else -1

    @property
    def generated_length(self) -> int:
        """Number of generated tokens."""
        return int(self.loss_mask.sum())


@dataclass(slots=True, eq=False)
class Trajectory:
    """A rollout: the samples of one prompt.

    `rollout_id` names this attempt and is unique in the run; `prompt_id` names the prompt within its epoch, so that a
    prompt which is dropped and tried again keeps its `prompt_id`. `order` is the prompt's position in the data order
    (epoch included); training batches are put in this order, whatever order the rollouts finished in.
    """

    rollout_id: str
    prompt_id: str
    order: int
    samples: tuple[Sample, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest generated token of any sample; -1 if nothing was generated."""
        versions = [sample.oldest_version for sample in self.samples if sample.generated_length]
        return min(versions, default=-1)
