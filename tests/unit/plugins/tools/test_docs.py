"""Every example of docs/tools.md: what it sets is accepted, its tools load, and its table has every format."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.api import Tool, ToolCall, as_tool
from asyncrl.chat.parsers import FORMATS
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.plugins.settings import ToolConfig
from asyncrl.plugins.tools.checks import check, code_problems
from asyncrl.rollout.user_code.tools import RunTools
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "tools.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def code(defined: str) -> str:
    return next(
        block for block in blocks(PAGE, "python") if re.search(rf"^(?:async )?(?:def|class) {defined}\b", block, re.M)
    )


def test_the_table_has_every_format_of_calls() -> None:
    table = PAGE.partition("\n## Formats of tool calls\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [*FORMATS]


@pytest.mark.parametrize("text", blocks(PAGE, "yaml"))
def test_the_settings_are_accepted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tools.py").write_text(code("weather"))
    monkeypatch.chdir(tmp_path)
    merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), OmegaConf.create(text))
    config: Any = OmegaConf.to_object(merged)
    assert config.tools or config.mcp
    assert [*check(config), *code_problems(config)] == []


async def test_the_function_is_a_tool() -> None:
    namespace: dict[str, Any] = {}
    exec(code("weather"), namespace)
    tool = as_tool(namespace["weather"], api_key="k")
    assert tool.schema()["function"]["parameters"]["properties"]["city"]["description"] == "its name, in English."
    assert (await tool.execute("a", {"city": "Oslo"})).text == "sunny in Oslo for 1 days"


async def test_the_class_is_a_tool_and_the_agent_of_ones_own_calls_it(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(code("Notes"))
    namespace: dict[str, Any] = {}
    exec(code("run"), namespace)

    asked: list[Any] = []

    class Client:
        async def chat(self, messages: Any, *, tools: Any) -> Any:
            assert [tool["function"]["name"] for tool in tools] == ["note"]
            asked.append([*messages])
            calls = () if asked[1:] else (ToolCall("a", "note", {"text": "x"}), ToolCall("b", "note", {"text": "y"}))
            return SimpleNamespace(tool_calls=calls, content="x and y", message={"role": "assistant", "content": ""})

    class Prompt:
        data = {"prompt": "?", "answer": "y", "tool_args": {"note": {"notes": ["before"]}}}  # noqa: RUF012

    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        tools = RunTools([ToolConfig(path=f"{tmp_path / 'notes.py'}:Notes")], (), runner).toolbox
        assert isinstance(tools.tools["note"].tool, Tool)
        assert await namespace["run"](Prompt(), None, Client(), tools=tools) == 1.0
        assert [(each["role"], each["content"]) for each in asked[1]] == [
            ("user", "?"),
            ("assistant", ""),
            ("tool", "before\nx"),
            ("tool", "before\nx\ny"),
        ]
        async with tools.session(Prompt.data) as session:
            result = await session.call(ToolCall("a", "note", {"text": "x"}))
            assert result.text == "before\nx"
            assert await session.rewards() == {"tool/note": pytest.approx(0.2)}
    assert "tools" in inspect.signature(namespace["run"]).parameters
