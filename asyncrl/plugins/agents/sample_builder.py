"""Build a `Sample` turn by turn: tokens that the model wrote carry loss, all others do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api import Completion, Sample
from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import NOT_GENERATED, routing_of_turns


class SampleBuilder:
    """A growing conversation. It starts with the prompt's tokens and pictures."""

    def __init__(self, prompt_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()) -> None:
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routing: list[NDArray[Any] | None] = []
        self._pictures: list[PlacedPicture] = []
        self.observe(prompt_ids, pictures)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the context of the next turn."""
        return tuple(self._tokens)

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """All pictures so far, at spans of `tokens`."""
        return tuple(self._pictures)

    def observe(self, token_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()) -> None:
        """Append tokens that the policy did not write (prompt, feedback, tool output), with pictures at their spans."""
        count = len(token_ids)
        self._pictures += [placed.shifted(len(self._tokens)) for placed in pictures]
        self._tokens.extend(token_ids)
        self._mask.extend([0] * count)
        self._logprobs.extend([0.0] * count)
        self._versions.extend([NOT_GENERATED] * count)

    def generate(self, completion: Completion) -> None:
        """Append the policy's answer to the context `tokens`, with its log-probabilities and versions.

        Raises:
            ValueError: it answers another context, or comes from another policy.
        """
        if completion.policy:
            raise ValueError(
                f"an answer of policy {completion.policy!r} is not trained; append its tokens with `observe`"
            )
        before = len(self._tokens)
        if completion.token_ids and completion.routing is not None:
            if len(completion.routing) != before + len(completion.token_ids) - 1:
                raise ValueError(
                    f"the completion tells the experts of {len(completion.routing)} tokens, and {before} come before "
                    f"its {len(completion.token_ids)}: ask for it with the builder's own tokens as input_ids"
                )
            self._routing.append(completion.routing)
        self._tokens.extend(completion.token_ids)
        self._mask.extend([1] * len(completion.token_ids))
        self._logprobs.extend(completion.logprobs)
        self._versions.extend(completion.versions)

    def build(self, reward: float, *, truncated: bool) -> Sample:
        """Return the finished sample.

        Raises:
            ValueError: a completion's log-probabilities or versions did not match its tokens in number.
        """
        return Sample(
            tokens=np.array(self._tokens, np.int32),
            loss_mask=np.array(self._mask, np.uint8),
            behave_logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            reward=reward,
            truncated=truncated,
            routing=routing_of_turns(len(self._tokens), self._routing),
            pictures=self.pictures,
        )
