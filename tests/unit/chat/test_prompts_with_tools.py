"""`dataset.max_prompt_tokens` counts what the template says of the tools, where the agent offers them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.api import GenerationClient, messages_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.data.prompt_format import OverlongPrompt
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.data.settings import Overlong
from asyncrl.launch.before_start.data import check_prompts
from asyncrl.plugins.settings import McpServerConfig, ToolConfig
from asyncrl.rollout.user_code.components import UserComponents

from .conftest import TEMPLATES

TOOL_AGENT = "asyncrl.plugins.agents.tool_agent:ToolAgent"
OWN_AGENTS = """
async def offers(prompt, env, client, tools):
    "Tells the model of the run's tools."

async def offers_none(prompt, env, client):
    "Knows of none."
"""


@pytest.fixture
def config(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., ExperimentConfig]:
    """`config(agent, template)`: an experiment whose second prompt is 30 words, with the calculator as its tool."""

    def make(agent: str = TOOL_AGENT, template: str = "qwen2.5") -> ExperimentConfig:
        folder = tmp_path / "model"
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
        (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 4096}))
        rows = [{"prompt": text, "answer": "7"} for text in ("What is 3 + 4?", "word " * 30)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "own.py").write_text(OWN_AGENTS)
        made = ExperimentConfig()
        made.model.path, made.dataset.path = str(folder), str(tmp_path / "rows.jsonl")
        made.agent.path = agent.replace("own.py", str(tmp_path / "own.py"))
        made.tools = [ToolConfig(path="asyncrl.plugins.tools.calculator:calculator")]
        made.eval.interval = 0
        return made

    return make


def ref(row: int) -> PromptRef:
    return PromptRef(f"e0-{row}", row, row)


@pytest.mark.parametrize("template", ["chatml", "qwen2.5", "llama3.1"])
def test_a_prompts_tokens_are_those_of_the_agents_first_call(
    config: Callable[..., ExperimentConfig], template: str
) -> None:
    components = UserComponents(config(template=template))
    prompt = components.prompts.train(ref(0))
    client = components.conversations.client(cast(GenerationClient, None), prompt)
    assert prompt.input_ids == client.prompt_ids(messages_of(prompt), tools=components.tools.toolbox.schemas)
    assert '"name": "calculator"' in components.tokenizer.decode(list(prompt.input_ids))


def test_a_model_with_fewer_positions_than_prompt_and_answer_is_refused_with_what_mends_it(
    config: Callable[..., ExperimentConfig],
) -> None:
    made = config()
    longest = check_prompts(made)["dataset"].longest
    model = Path(str(made.model.path)) / "config.json"
    made.rollout.sampling.max_new_tokens = 20
    model.write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": longest + 20}))
    check_prompts(made)
    model.write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": longest + 19}))
    with pytest.raises(
        ConfigError, match=rf"^rollout\.sampling\.max_new_tokens=20: .* has {longest + 19} positions"
    ) as it:
        check_prompts(made)
    assert "use rollout.sampling.max_new_tokens=19 or less, " in str(it.value)
    made.dataset.max_prompt_tokens, made.dataset.overlong = longest - 1, Overlong.filter
    check_prompts(made)


def test_the_survey_and_the_limit_count_the_tools(config: Callable[..., ExperimentConfig]) -> None:
    with_tools, without = config(), config()
    without.tools = []
    shown, bare = check_prompts(with_tools)["dataset"], check_prompts(without)["dataset"]
    assert shown.tools > 100
    assert shown.longest == bare.longest + shown.tools
    assert f"{shown.tools} tokens of each prompt are what the chat template says of the tools" in shown.lines(
        2048, Overlong.filter
    )
    assert shown.first is not None
    assert "calculator" in shown.first[0]
    assert bare.first is not None

    with_tools.dataset.max_prompt_tokens = without.dataset.max_prompt_tokens = bare.longest
    assert check_prompts(without)["dataset"].overlong == 0
    with pytest.raises(ConfigError, match="none of 2 rows makes a prompt; row 0 has a prompt of"):
        check_prompts(with_tools)
    with pytest.raises(OverlongPrompt, match=f"{shown.tools} of them what the template says of the tools"):
        UserComponents(with_tools).prompts.train(ref(0))
    with_tools.dataset.max_prompt_tokens = shown.longest - 1
    assert check_prompts(with_tools)["dataset"].overlong == 1


@pytest.mark.parametrize(("agent", "counted"), [("own.py:offers", True), ("own.py:offers_none", False)])
def test_tools_count_only_where_the_agent_takes_them(
    config: Callable[..., ExperimentConfig], agent: str, *, counted: bool
) -> None:
    made = config(agent)
    made.eval.interval, made.eval.path, made.eval.agent = 1, made.dataset.path, {"path": TOOL_AGENT}
    assert (check_prompts(made)["dataset"].tools > 0) is counted
    ids = list(UserComponents(made).prompts.train(ref(0)).input_ids)
    assert ("calculator" in UserComponents(made).tokenizer.decode(ids)) is counted


def test_it_says_that_those_of_mcp_servers_are_not_counted_yet(config: Callable[..., ExperimentConfig]) -> None:
    made = config()
    made.tools, made.mcp = [], [McpServerConfig(name="mine", command="mine")]
    assert any("MCP servers come on top" in line for line in check_prompts(made)["dataset"].lines(9, Overlong.filter))


@pytest.mark.parametrize("overlong", [Overlong.left, Overlong.right, Overlong.middle])
def test_a_shortened_prompt_is_what_agents_that_converse_in_messages_see(
    config: Callable[..., ExperimentConfig], overlong: Overlong
) -> None:
    made: Any = config()
    made.dataset.max_prompt_tokens = check_prompts(made)["dataset"].longest - 10
    made.dataset.overlong = overlong
    components = UserComponents(made)
    prompt = components.prompts.train(ref(1))
    assert len(prompt.input_ids) <= made.dataset.max_prompt_tokens
    assert 10 < len(messages_of(prompt)[0]["content"]) < len("word " * 30) - 5
    client = components.conversations.client(cast(GenerationClient, None), prompt)
    assert prompt.input_ids == client.prompt_ids(messages_of(prompt), tools=components.tools.toolbox.schemas)
    assert prompt.data["answer"] == "7"
