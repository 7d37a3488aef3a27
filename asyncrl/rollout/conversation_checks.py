"""Checks of the endpoint's rules for conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.api.trajectory import check_group, role_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.rollout.settings import OfferedTools

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check(config: ExperimentConfig) -> Iterator[str]:
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
