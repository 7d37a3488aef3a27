"""A finished rollout: a prompt's group of samples, each token with its policy version and behaviour log-probability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence of a group. Every array is aligned with `tokens` and has shape `[T]`.

    T counts prompt, generated and environment tokens. The arrays are shared, not copied: leave them unchanged.

    Raises:
        ValueError: an array's length differs from that of `tokens`, the sample is empty, or its reward or a
            log-probability is no finite number (either would turn the gradient of a whole minibatch into NaN).
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
        for name in ("loss_mask", "behave_logprobs", "versions"):
            shape = getattr(self, name).shape
            if shape != (length,):
                raise ValueError(f"Sample.{name} has shape {shape}, expected ({length},) as Sample.tokens")
        if self.reward is None or not math.isfinite(self.reward):
            raise ValueError(f"Sample.reward is {self.reward}: the reward of an answer is a finite number")
        finite_T = np.isfinite(self.behave_logprobs)
        if not finite_T.all():
            position = int(finite_T.argmin())
            raise ValueError(
                f"Sample.behave_logprobs[{position}] is {self.behave_logprobs[position]}: the policy gives every token "
                "that it generates a finite log-probability, and other tokens have 0"
            )

    @property
    def generated_length(self) -> int:
        """Number of generated tokens."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns(Sequence[Sample]):
    """S samples with their T tokens end to end, as they travel and as training wants them.

    As a sequence it makes each sample when asked for it, its arrays views into the columns.
    """

    tokens: NDArray[np.int32]
    """`[T]`, as are the next three; see `Sample`."""
    loss_mask: NDArray[np.uint8]
    behave_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """`[S]`: tokens of each sample, at least 1; their sum is T."""
    rewards: NDArray[np.float64]
    """`[S]`."""
    truncated: NDArray[np.uint8]
    """`[S]`, 0 or 1."""

    @classmethod
    def join(cls, samples: Sequence[Sample]) -> SampleColumns:
        """The columns of `samples`, at least one; they are copied unless they are columns already."""
        if isinstance(samples, SampleColumns):
            return samples
        if isinstance(samples, SharedPrompt):
            return samples.whole()
        return cls(
            np.concatenate([sample.tokens for sample in samples]),
            np.concatenate([sample.loss_mask for sample in samples]),
            np.concatenate([sample.behave_logprobs for sample in samples]),
            np.concatenate([sample.versions for sample in samples]),
            np.array([len(sample.tokens) for sample in samples], np.int64),
            np.array([sample.reward for sample in samples], np.float64),
            np.array([sample.truncated for sample in samples], np.uint8),
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """`[S]`: position in T of each sample's first token."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sample]:
        ends = list(accumulate(self.lengths.tolist()))
        by_sample = zip([0, *ends], ends, self.rewards.tolist(), self.truncated.tolist(), strict=False)
        for start, end, reward, truncated in by_sample:
            yield Sample(
                self.tokens[start:end],
                self.loss_mask[start:end],
                self.behave_logprobs[start:end],
                self.versions[start:end],
                reward,
                bool(truncated),
            )

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        return tuple(self)[index]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt(Sequence[Sample]):
    """S samples that begin with the same prompt, which is held once: so a group travels, and so it waits for training.

    As a sequence it makes whole samples, prompt and rest, when asked for them.
    """

    prompt: NDArray[np.int32]
    """`[P]`: the tokens that all samples begin with and that no policy generated."""
    rest: SampleColumns
    """What follows the prompt in each sample, which may be nothing: here a length of 0 is possible."""

    def whole(self) -> SampleColumns:
        """The columns of the samples, prompts included; copied at each call."""
        rest, size = self.rest, len(self.prompt)
        ends = np.cumsum(rest.lengths)[:-1]

        def repeat(prompt: NDArray[Any], column: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([part for own in np.split(column, ends) for part in (prompt, own)])

        return SampleColumns(
            repeat(self.prompt, rest.tokens),
            repeat(np.zeros(size, np.uint8), rest.loss_mask),
            repeat(np.zeros(size, np.float32), rest.behave_logprobs),
            repeat(np.full(size, -1, np.int32), rest.versions),
            rest.lengths + size,
            rest.rewards,
            rest.truncated,
        )

    def __len__(self) -> int:
        return len(self.rest)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.whole())

    def __getitem__(self, index: Any) -> Any:
        return self.whole()[index]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A rollout: the samples of one prompt.

    `rollout_id` names this attempt and is unique in the run; `prompt_id` names the prompt within its epoch, so that a
    prompt which is dropped and tried again keeps its `prompt_id`. `order` is the prompt's position in the data order
    (epoch included); training batches are put in this order, whatever order the rollouts finished in. One that came
    over a socket has its samples in columns, and their common prompt once.
    """

    rollout_id: str
    prompt_id: str
    order: int
    samples: Sequence[Sample]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> SampleColumns:
        """The samples, at least one, in whole columns; joined at each call if they are not so already."""
        return SampleColumns.join(self.samples)
