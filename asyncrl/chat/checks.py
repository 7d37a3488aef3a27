"""Checks of the chat's settings, and of the endpoint's rules for conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.api.trajectory import check_group, role_of
from asyncrl.chat.parsers import FORMATS
from asyncrl.chat.settings import AUTO
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import agents_turns
from asyncrl.config.setting import not_a_choice
from asyncrl.config.variants import codes_of_sets
from asyncrl.rollout.settings import OfferedTools

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


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
    yield from _conversations(config)


def _conversations(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each rule of `rollout.endpoint.conversations` that is for no call, or does nothing."""
    rules = config.rollout.endpoint.conversations
    for number, rule in enumerate(rules):
        at = f"rollout.endpoint.conversations[{number}]"
        if not rule.model and not rule.header and rule.tools is OfferedTools.any:
            yield f"{at}.model='': the rule names no calls; give model, header or tools (none, some)"
        if rule.header and not _HEADER.fullmatch(rule.header):
            yield f"{at}.header={rule.header!r}: no name of a header, such as x-claude-code-agent-id"
        if not rule.header and rule.value != "*":
            yield f"{at}.value={rule.value!r}: of which header? Name it as header"
        if rule.trained and not rule.group:
            yield f"{at}.trained=true: without a group the rule does nothing; give one, or set trained to false"
        try:
            check_group(rule.group)
        except ValueError as error:
            yield f"{at}.group={rule.group!r}: {error}"
        if rule.group and role_of(rule.group) in config.trained_policies:
            yield f"{at}.group={rule.group!r}: {role_of(rule.group)!r} is a trained policy; give another name"
        for first, other in enumerate(rules[:number]):
            if (
                other.model in ("", rule.model)
                and other.header.lower() in ("", rule.header.lower())
                and other.value in ("*", rule.value)
                and other.tools in (OfferedTools.any, rule.tools)
            ):
                yield f"{at}.model={rule.model!r}: conversations[{first}] is for all these calls; put this one first"
                break
