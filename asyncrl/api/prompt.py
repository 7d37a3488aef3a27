"""One prompt as an agent receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.api.generation import SamplingParams
from asyncrl.api.picture import PlacedPicture
from asyncrl.api.seeds import seed_from


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the dataset, made ready for an agent.

    `data` is the dataset's own row (for the built-in agents: `prompt` text and what the reward needs), with the prompt
    as `dataset.overlong` shortened it; `input_ids` its tokens, with what the template says of the settings' tools
    where the agent takes them; `group_size` the number of episodes wanted; `sampling` the settings of the experiment,
    with the seed of this prompt or, for one episode, of its `member` of the group. `pictures` stand at spans of
    `input_ids`: an agent that asks in token ids gives them with its request, and its samples have them.
    """

    prompt_id: str
    order: int
    data: Mapping[str, Any]
    input_ids: tuple[int, ...]
    group_size: int
    sampling: SamplingParams
    member: int = 0
    pictures: tuple[PlacedPicture, ...] = ()

    def of_member(self, member: int) -> Prompt:
        """The prompt as episode `member` of the group receives it: with a seed of its own."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("member", seed, member)
        return replace(self, member=member, sampling=replace(self.sampling, seed=own))

    def again(self, attempt: int) -> Prompt:
        """The episode's prompt for its try number `attempt`, the first being 0: with another seed."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("try", seed, attempt)
        return replace(self, sampling=replace(self.sampling, seed=own))
