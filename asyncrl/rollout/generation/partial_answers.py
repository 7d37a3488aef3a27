"""The partial answers to a request: results of past rounds, and the size of the next round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import Completion, FinishReason, GenerationRequest
from asyncrl.plugins.chat.stop_strings import Decode, kept_tokens


@dataclass(slots=True)
class PartialAnswer:
    """One sample so far: three lists of one length."""

    seed: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    routing: list[NDArray[Any]] = field(default_factory=list)
    """Reported experts of the request's and the sample's tokens, in consecutive parts."""
    cached_tokens: int = 0
    """Tokens of the request that the first round did not compute. Later rounds also send generated tokens and do not
    count.
    """

    @property
    def routed(self) -> int:
        """Number of tokens whose experts are recorded."""
        return sum(map(len, self.routing))

    def extend(self, part: Completion, budget: int, stop: Sequence[str], decode: Decode | None) -> None:
        """Append the result of a round; `budget` is the sample's `max_new_tokens`, `stop` its stop strings."""
        if not self.token_ids:
            self.cached_tokens = part.cached_tokens
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        kept = kept_tokens(self.token_ids, stop, decode) if stop and decode else None
        if kept is not None:
            for column in (self.token_ids, self.logprobs, self.versions):
                del column[kept:]
            self.finish = FinishReason.stop
        elif part.finish_reason == FinishReason.stop:
            self.finish = FinishReason.stop
        elif len(self.token_ids) >= budget:
            self.finish = FinishReason.length

    def extend_routing(self, told: NDArray[Any] | None, start: int) -> None:
        """Record the expert choices of tokens that have none yet; `told` are those of the tokens from position `start`
        on.

        A recorded choice is never overwritten. So each token keeps the experts of the round that sampled the next
        token, even if a later round recomputes it under newer weights.
        """
        if told is not None:
            self.routing.append(told[self.routed - start :])

    def completion(self, prompt_tokens: int) -> Completion:
        """Return the whole answer, once it is complete."""
        assert self.finish is not None, "a partial was left open"
        routing = None
        if self.routing:  # without the experts of tokens cut off after a stop string
            routing = np.concatenate(self.routing)[: prompt_tokens + len(self.token_ids) - 1]
        return Completion(
            self.token_ids, self.logprobs, self.versions, self.finish, routing, cached_tokens=self.cached_tokens
        )


@dataclass(slots=True)
class OpenRequest:
    """A request in progress: its id at the manager, its content, a partial answer per sample, and the largest number of
    tokens per round, now and without failures.
    """

    own_id: str
    request: GenerationRequest
    rollout_id: str | None
    min_version: int | None
    partials: list[PartialAnswer]
    round_tokens: int
    most_round_tokens: int
    scores: tuple[float, ...] = ()
    """Log-probabilities of the request's own tokens, if it asks for them, once they have arrived."""

    @property
    def open_partials(self) -> dict[int, PartialAnswer]:
        """The partials that are not complete yet, by sample."""
        if self.scores:
            return {}
        return {index: partial for index, partial in enumerate(self.partials) if partial.finish is None}

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(partial.token_ids) for partial in self.partials)

    def wanted(self, partial: PartialAnswer) -> int:
        """Return the number of tokens that the next round requests for `partial`."""
        return min(self.request.sampling.max_new_tokens - len(partial.token_ids), self.round_tokens)

    def ask_for_less(self) -> None:
        """Halve the tokens per round, because the last round was not answered."""
        self.round_tokens = max(1, max(map(self.wanted, self.open_partials.values())) // 2)

    def ask_for_more(self) -> None:
        """Double the tokens per round, because the last round was answered quickly."""
        self.round_tokens = min(2 * self.round_tokens, self.most_round_tokens)
