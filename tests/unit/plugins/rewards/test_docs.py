"""Every example of docs/rewards.md: what it shows is so, and what it sets is accepted."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.rollout.checks import check, code_problems
from asyncrl.rollout.user_code.rewards import load_rewards

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "rewards.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("section", [title for title, text in SECTIONS.items() if blocks(text, "pycon")])
def test_the_examples_show_what_they_say(section: str) -> None:
    source = "\n".join(blocks(SECTIONS[section], "pycon"))
    test = doctest.DocTestParser().get_doctest(source, {}, section, "docs/rewards.md", 0)
    assert test.examples
    messages: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=messages.append)
    assert messages == []


@pytest.mark.parametrize("text", blocks(PAGE, "yaml"))
def test_the_settings_are_accepted_and_name_rewards_that_load(text: str) -> None:
    merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), OmegaConf.create(text))
    config: Any = OmegaConf.to_object(merged)
    assert [*check(config), *code_problems(config)] == []
    parts = load_rewards(config.reward, config.rewards)
    assert [part.name for part in parts] == [part.name for part in config.rewards] or len(parts) == 1
