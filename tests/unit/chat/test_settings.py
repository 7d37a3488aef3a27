"""Settings of chat: what is wrong is named with what to do, and the context has room for the agent's turns."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.memory import context_length, turns
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.setting import ConfigError
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.manager.settings import PolicyConfig
from asyncrl.plugins.settings import ToolConfig
from asyncrl.rollout.settings import ConversationConfig, OfferedTools
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code.conversations import chat_policy

from .conftest import TEMPLATES

RETRY = "asyncrl.plugins.agents.retry:RetryAgent"


def config_with(**chat: Any) -> ExperimentConfig:
    config = ExperimentConfig()
    for name, value in chat.items():
        setattr(config.rollout.chat, name, value)
    return config


@pytest.mark.parametrize(
    ("chat", "agent", "parts"),
    [
        ({"parser": "hermse"}, {}, ["rollout.chat.parser='hermse'", "hermes"]),
        ({"max_turns": -1}, {}, ["rollout.chat.max_turns=-1"]),
        ({"max_turns": 2}, {"max_turns": 3}, ["rollout.chat.max_turns=2", "agent.args.max_turns=3", "use 0"]),
    ],
)
def test_a_wrong_setting_is_named(chat: dict[str, Any], agent: dict[str, Any], parts: list[str]) -> None:
    config = config_with(**chat)
    config.agent.path, config.agent.args = RETRY, agent
    with pytest.raises(ConfigError) as caught:
        validate(config)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([{"trained": False}], r"conversations\[0\].model='': the rule names no calls"),
        ([{"model": "x", "value": "1", "group": "g"}], r"conversations\[0\].value='1': of which header"),
        ([{"header": "a b", "group": "g"}], r"conversations\[0\].header='a b'"),
        ([{"model": "x"}], r"conversations\[0\].trained=true: without a group the rule does nothing"),
        ([{"model": "x", "group": "g" * 65}], r"conversations\[0\].group="),
        ([{"model": "x", "group": "judge/a"}], r"'judge' is a trained policy"),
        (
            [{"tools": OfferedTools.none, "group": "g"}, {"model": "x", "tools": OfferedTools.none, "trained": False}],
            r"conversations\[1\].model='x': conversations\[0\] is for all these calls",
        ),
    ],
)
def test_a_rule_of_conversations_that_is_for_no_call_or_does_nothing_is_named(
    rules: list[dict[str, Any]], named: str
) -> None:
    config = ExperimentConfig()
    config.policies = [PolicyConfig(name="judge", trained=True)]
    config.rollout.endpoint.conversations = [ConversationConfig(**rule) for rule in rules]
    (problem,) = (each for each in optional_problems(config) if each.startswith("rollout.endpoint"))
    assert re.search(named, problem)


def test_rules_of_conversations_that_differ_pass_and_come_from_a_file() -> None:
    text = "[{tools: none, header: x-id, trained: false}, {tools: none, group: title}, {model: claude-*, group: sub}]"
    config = load_experiment("gsm8k_chat", [f"rollout.endpoint.conversations={text}"])
    assert isinstance(config, ExperimentConfig)
    assert [rule.tools for rule in config.rollout.endpoint.conversations] == ["none", "none", "any"]
    assert list(optional_problems(config)) == []


def test_a_stop_string_that_no_text_holds_is_named() -> None:
    config = ExperimentConfig()
    config.rollout.sampling.stop = [""]
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop=\[''\]"):
        validate(config)


def test_the_context_has_room_for_the_turns_of_the_agent() -> None:
    """Given, its own default, or the limit; each further turn is an answer and what comes before it."""
    config = config_with(feedback_tokens=10)
    config.dataset.max_prompt_tokens, config.rollout.sampling.max_new_tokens = 100, 20
    assert turns(config) == 1
    assert context_length(config, {}) == 120
    config.agent.path = RETRY
    assert context_length(config, {}) == 150  # max_turns is 2 by default
    config.agent.args = {"max_turns": 4}
    assert context_length(config, {}) == 210
    config.rollout.chat.max_turns = 3
    assert context_length(config, {}) == 180
    config.generation.context_length = 500
    assert context_length(config, {}) == 500
    assert context_length(config, {"max_position_embeddings": 64}) == 64


def test_the_limit_names_the_setting_that_it_comes_from() -> None:
    config = config_with(max_turns=3, max_tool_s=9.0)
    config.generation.context_length, config.generation.max_total_tokens = 500, 400
    limits = chat_policy(config, {}).limits
    assert (limits.max_context, limits.context_setting) == (400, "generation.max_total_tokens")
    assert (limits.max_turns, limits.max_tool_s) == (3, 9.0)
    config.generation.backend = "sglang"  # type: ignore[assignment]
    assert chat_policy(config, {}).limits == limits, "a limit that is set bounds SGLang's cache too"
    config.generation.max_total_tokens = 0
    limits = chat_policy(config, {}).limits
    assert (limits.max_context, limits.context_setting) == (500, "generation.context_length")


def test_servers_are_told_of_stop_strings_only_where_they_have_a_tokenizer() -> None:
    generation = ExperimentConfig().generation
    assert generation.engine.finds_stop_strings
    generation.backend = "sglang"  # type: ignore[assignment]
    assert not generation.engine.finds_stop_strings
    generation.sglang.args = {"skip-tokenizer-init": False}
    assert generation.engine.finds_stop_strings
    generation.sglang.urls = ["http://127.0.0.1:1"]
    assert not generation.engine.finds_stop_strings


def test_tools_are_offered_in_the_prompts_of_those_agents_that_take_them(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 800}')
    (tmp_path / "template.jinja").write_text(TEMPLATES["chatml"])
    config = ExperimentConfig(tools=[ToolConfig(path="asyncrl.plugins.tools.calculator:calculator")])
    config.model.path, config.dataset.chat_template = str(tmp_path / "model"), str(tmp_path / "template.jinja")
    config.dataset.max_prompt_tokens = 1000
    config.eval.agent = {"path": "asyncrl.plugins.agents.tool_agent:ToolAgent"}
    components = UserComponents(config)
    trained = components.prompts.train(PromptRef("p", 0, 0))
    evaluated = components.prompts.evaluation("held_out", 0, 0)
    shown = [components.tokenizer.decode(list(prompt.input_ids)) for prompt in (trained, evaluated)]
    assert ["calculator" in text for text in shown] == [False, True]
