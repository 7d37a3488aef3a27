"""Every file and setting of docs/agents.md and of the games of docs/policies.md is accepted, and rolls a group out."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.api import GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.data.tokenizers import ChatTokenizer
from asyncrl.rollout.checks import check
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.user_code.components import UserComponents

from .conftest import TEMPLATES, FakePolicy

DOCS = Path(__file__).resolve().parents[3] / "docs"
GAMES = "\n## Games: gymnasium\n"
PAGE = (DOCS / "agents.md").read_text()
PAGE += GAMES + (DOCS / "policies.md").read_text().split(GAMES)[1].split("\n## ")[0]
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
SETTINGS = [
    (title, text) for title, part in SECTIONS.items() for text in re.findall(r"^```yaml\n(.*?)^```$", part, re.S | re.M)
]


OWN_SETTINGS = """

import dataclasses


@dataclasses.dataclass
class Mine:
    tries: int
    high: int = 50
"""
"""The dataclass that a comment of the page describes."""


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """The page's files beside a model's folder without weights."""
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, f"the first line names the file: {text[:40]}"
        (tmp_path / name[1]).write_text(text + OWN_SETTINGS)
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 800}')
    (tmp_path / "template.jinja").write_text(TEMPLATES["chatml"])
    return tmp_path


def load(folder: Path, text: str) -> ExperimentConfig:
    placed = re.sub(r"\b(my_\w+\.py):", rf"{folder}/\1:", text)
    (folder / "page.yaml").write_text(f"defaults: [experiment_schema, _self_]\n{placed}")
    config = load_experiment("page", [], folder)
    assert isinstance(config, ExperimentConfig)
    config.model.path = str(folder / "model")
    config.dataset.chat_template = str(folder / "template.jinja")
    config.dataset.max_prompt_tokens = 200
    return config


class TurnsOfAGroup(FakePolicy):
    """Says `turns[i]`, in any order, in the episodes' i-th turns: one that is ahead does not take another's words.

    The turn is told by how many messages lie before it.
    """

    def __init__(self, end_id: int, tokenizer: ChatTokenizer, turns: Sequence[Sequence[str]]) -> None:
        super().__init__(end_id, 700, tokenizer.encode)
        self._turns = [list(texts) for texts in turns]
        self._messages_before: list[int] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        before = list(request.input_ids).count(self._end_id)
        if before not in self._messages_before:  # an episode's turns come one after the other, so this is the next turn
            self._messages_before.append(before)
        if self._turns:
            self._texts = [self._turns[self._messages_before.index(before)].pop(0)]
        return await super().generate(request)


async def roll_out(config: ExperimentConfig, tokenizer: ChatTokenizer, *turns: Sequence[str]) -> Sequence[Sample]:
    components = UserComponents(config)
    (end_id,) = tokenizer.encode("<|im_end|>")
    policy = TurnsOfAGroup(end_id, tokenizer, turns)
    ids = tuple(tokenizer.encode("What is 3 + 4?"))
    row = {"prompt": "What is 3 + 4?", "answer": "7"}
    prompt = Prompt("p", 0, row, ids, 3, SamplingParams(max_new_tokens=16, seed=7))
    async with components.runner, asyncio.timeout(300):
        samples, _ = await run_group(
            components.agent, components.environments.of_group(3), prompt, policy, components.conversations.client
        )
    return samples


@pytest.mark.parametrize(("title", "text"), SETTINGS)
async def test_the_settings_are_accepted_and_a_group_is_rolled_out(
    folder: Path, tokenizer: ChatTokenizer, title: str, text: str
) -> None:
    config = load(folder, text)
    assert [problem for problem in check(config) if problem.startswith(("agent", "env", "reward"))] == []
    samples = await roll_out(config, tokenizer)
    assert {sample.episode for sample in samples} == {0, 1, 2}
    assert all(sample.generated_length > 0 for sample in samples)


async def test_what_the_page_says_of_rewards_is_so(folder: Path, tokenizer: ChatTokenizer) -> None:
    by_title: dict[str, str] = {}
    for title, text in SETTINGS:
        by_title.setdefault(title, text)

    async def rewards(title: str, *turns: Sequence[str]) -> list[float]:
        config = load(folder, by_title[title])
        return sorted((sample.total_reward for sample in await roll_out(config, tokenizer, *turns)), reverse=True)

    assert await rewards("A reward", ["It is 7.", "7 or 8", ""]) == [1.0, 0.0, 0.0]
    guesses = (["7", "3", "9"], ["7", "8"], ["7"])  # all three guess, then those two again that were wrong, then one
    assert await rewards("An environment", *guesses) == [1.0, 0.5, 0.25]
    assert await rewards("Your own agent", *guesses) == [1.0, 0.5, 0.25]
    assert await rewards("Rewards of turns", *guesses) == pytest.approx([0.9, 0.8, 0.7])
    assert await rewards("Whole groups and batches", ["7", "seven and more", "7"]) == [1.0, 0.0, 0.0]
    samples = await roll_out(load(folder, by_title["Several conversations in an episode"]), tokenizer)
    assert [sample.episode for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.group for sample in samples] == ["solver", "judge"] * 3


def test_every_section_shows_something() -> None:
    assert len(SETTINGS) >= len(SECTIONS)
