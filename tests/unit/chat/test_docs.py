"""The examples of docs/chat.md run, and the settings and metrics that it names exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api import Prompt, messages_of
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.template import ChatFormat
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings

from .conftest import FakePolicy

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "chat.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.parametrize("block", BLOCKS)
async def test_the_agent_runs(block: str, chat_format: Callable[..., ChatFormat], prompt: Prompt) -> None:
    def check(data: dict[str, Any], answer: str) -> str | None:
        return None if answer == "7" else "no, again"

    chat = chat_format("chatml")
    space: dict[str, Any] = {"messages_of": messages_of, "check": check}
    exec(block, space)
    policy = FakePolicy(chat.findings.end_id or 0, 0, chat.tokenizer.encode, "6", "7")
    client = EpisodeClient(policy, prompt, chat)
    assert await space["run"](prompt, None, client) == 1.0
    (sample,) = client.samples(1.0)
    assert int(sample.loss_mask.sum()) == sum(len(each.token_ids) for each in policy.sampled)


def test_the_settings_that_it_names_are_there() -> None:
    known = {path for path, _, _ in settings(ExperimentConfig)}
    named = set(re.findall(r"`((?:rollout|dataset|generation)\.[a-z_.]+)[`=]", PAGE))
    assert len(named) > 8
    groups = {name.rpartition(".")[0] for name in known}
    assert named <= known | groups | {"rollout.chat"}
