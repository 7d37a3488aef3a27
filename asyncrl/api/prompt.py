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
    """A row of the dataset, prepared for an agent.

    Attributes:
        prompt_id: name in its epoch, `e<epoch>-<row>`.
        order: position in the data order.
        data: the dataset's row (for the built-in agents: `prompt` and the fields that the reward needs). The prompt is
            shortened if `dataset.overlong` requires it.
        input_ids: tokens of the prompt, with the template's description of the tools if the agent uses them.
        group_size: number of episodes wanted.
        sampling: sampling parameters of the experiment, with the seed of this prompt or of one `member`.
        member: number of the episode in its group.
        pictures: pictures at spans of `input_ids`. An agent that sends token ids passes the pictures with its
            request, and its samples have them.
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
        """Return the prompt for episode `member` of the group, with its own seed."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("member", seed, member)
        return replace(self, member=member, sampling=replace(self.sampling, seed=own))

    def again(self, attempt: int) -> Prompt:
        """Return the episode's prompt for attempt number `attempt`, counted from 0, with a different seed."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("try", seed, attempt)
        return replace(self, sampling=replace(self.sampling, seed=own))
