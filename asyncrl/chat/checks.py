"""Checks of the chat's settings."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.chat.parsers import FORMATS
from asyncrl.chat.settings import AUTO
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import agents_turns
from asyncrl.config.setting import not_a_choice
from asyncrl.config.variants import codes_of_sets


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    chat = config.rollout.chat
    if chat.parser not in (AUTO, *FORMATS):
        yield not_a_choice("rollout.chat.parser", chat.parser, (AUTO, *FORMATS))
    of_sets = {f"{group}.": played for group, played in codes_of_sets(config).items() if played.agent != config.agent}
    for whose, played in {"": config, **of_sets}.items():
        own = agents_turns(played)
        if not 0 < chat.max_turns < own:
            continue
        yield (
            f"rollout.chat.max_turns={chat.max_turns}: {whose}agent.args.max_turns={own} is more, and would never be "
            f"reached; use 0 (no limit) or {own} or more, or fewer turns of the agent"
        )
