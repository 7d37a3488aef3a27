"""The tools of a run: loaded as the settings say, and whatever they do costs a call, never the worker."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.api import Tool, ToolCall
from asyncrl.api.tool import as_tool
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.plugins.settings import McpServerConfig, ToolConfig
from asyncrl.plugins.tools.checks import check, code_problems
from asyncrl.plugins.tools.toolbox import MAX_ARGUMENT_CHARS, HostedTool, Toolbox, ToolFailure
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code.tools import RunTools, check_format
from asyncrl.rollout.user_code_pool.call_records import UserCodeError, metered
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

TOOLS = '''
import os
import sys
import time
from asyncrl.api import Tool, ToolResult


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


async def later(a: int) -> int:
    """Adds one, asynchronously."""
    return a + 1


def hangs(a: int) -> int:
    while True:
        time.sleep(0.01)


def raises(a: int) -> int:
    raise ValueError("boom")


def raises_no_text(a: int) -> int:
    raise ValueError("boom \\udce9")


def exits(a: int) -> int:
    os._exit(3)


def prints_100_mb(a: int) -> str:
    for _ in range(100):
        sys.stdout.write("x" * (1 << 20))
    return "done"


def returns_100_mb(a: int) -> str:
    return "x" * (100 << 20)


def wants_10_gb(a: int) -> int:
    return len(bytearray(10 << 30))


def leaves(a: int) -> int:
    sys.exit(2)


def no_result(a: int) -> object:
    found = []
    found.append(found)
    return found


def scaled(a: int, *, factor: int) -> int:
    """Scaled."""
    return a * factor


def runs(code: str, function: str, *, given: str = "", tool: str = "") -> str:
    return code + function + given + tool


class Counter(Tool):
    """Counts the calls of each sample; plain and asynchronous methods."""
    name = "counter"
    live = set()

    def __init__(self, *, reward: float = 0.5):
        self._reward, self._counts = reward, {}

    def schema(self):
        return {"type": "function", "function": {"name": self.name, "description": "", "parameters": {
            "type": "object", "properties": {"by": {"type": "integer"}}}}}

    async def create(self, instance_id, *, start=0):
        self.live.add(instance_id)
        self._counts[instance_id] = start

    def execute(self, instance_id, arguments):
        self._counts[instance_id] += arguments.get("by", 1)
        return ToolResult(str(self._counts[instance_id]), reward=0.1, metrics={"by": 1.0})

    async def calc_reward(self, instance_id):
        return self._reward

    def release(self, instance_id):
        self.live.discard(instance_id)


class Told(Tool):
    name = "told"

    def __init__(self):
        self.calls = []
        self.truth = ""

    def schema(self):
        return {
            "type": "function",
            "function": {"name": "told", "description": "x", "parameters": {"type": "object", "properties": {}}},
        }

    async def create(self, instance_id, ground_truth, **kwargs):
        self.truth = ground_truth
        self.calls.append(("create", {"ground_truth": ground_truth} | kwargs))

    async def execute(self, instance_id, arguments, *, unit=""):
        return f"{self.truth} {unit}"

    async def calc_reward(self, instance_id, *, bonus=0.0):
        self.calls.append(("calc_reward", {"bonus": bonus}))
        return bonus

    def release(self, instance_id, **kwargs):
        self.calls.append(("release", kwargs))


class BadReward(Counter):
    name = "bad_reward"

    def execute(self, instance_id, arguments):
        return ToolResult("x", reward=float("nan"))

    async def calc_reward(self, instance_id):
        raise RuntimeError("no reward")


class Unready(Counter):
    name = "unready"

    def __init__(self):
        raise OSError("no licence")


NOT_A_TOOL = 3
'''


@pytest.fixture
def module(tmp_path: Path) -> str:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    return str(file)


@pytest.fixture
async def runner():
    async with UserCodeRunner(UserCodeConfig(process_memory_mb=1024)) as made:
        yield made


def _tools(runner: UserCodeRunner, module: str, *names: str, **settings: Any) -> RunTools:
    return RunTools([ToolConfig(path=f"{module}:{name}", **settings) for name in names], (), runner)


async def _call(tools: RunTools, name: str, arguments: Any, **data: Any):
    async with tools.toolbox.session(data) as session:
        return await session.call(ToolCall("id", name, arguments)), dict(session.metrics)


@pytest.mark.parametrize("run_in", ["auto", "loop", "thread", "process"])
async def test_a_function_is_called_wherever_it_runs(runner, module, run_in):
    tools = _tools(runner, module, "add", run_in=run_in)
    result, metrics = await _call(tools, "add", {"a": 2})
    assert (result.text, result.is_error) == ("3", False)
    assert metrics["tool/add/calls"] == 1
    assert metrics["tool/add/errors"] == 0
    assert metrics["tool/add/seconds"] > 0


@pytest.mark.parametrize("run_in", ["auto", "process"])
async def test_an_asynchronous_function_is_called(runner, module, run_in):
    assert (await _call(_tools(runner, module, "later", run_in=run_in), "later", {"a": 2}))[0].text == "3"


@pytest.mark.parametrize(
    ("name", "run_in", "reported"),
    [
        ("hangs", "thread", "did not return within 0.3 s"),
        ("hangs", "process", "did not return within 0.3 s"),
        ("raises", "thread", "raised ValueError: boom"),
        ("raises", "process", "raised ValueError: boom"),
        ("raises_no_text", "thread", "raised ValueError: boom ?"),
        ("raises_no_text", "process", "surrogates not allowed"),
        ("leaves", "thread", "raised SystemExit"),
        ("exits", "process", "lost its process"),
        ("no_result", "thread", "returned an invalid result"),
    ],
)
async def test_a_tool_that_fails_gives_an_error_text_and_is_counted(runner, module, name, run_in, reported):
    tools = _tools(runner, module, name, "add", run_in=run_in, timeout_s=0.3 if name == "hangs" else 120.0)
    for _ in range(2):
        result, metrics = await _call(tools, name, {"a": 1})
        assert result.is_error
        assert result.text.startswith("Error: ")
        assert reported in result.text
        assert "my_tools.py" not in result.text
        assert metrics[f"tool/{name}/errors"] == 1
        result.text.encode()
    if name != "hangs":
        assert (await _call(tools, "add", {"a": 1}))[0].text == "2"


async def test_a_tool_that_wants_too_much_memory_is_refused_it(runner, module):
    result, _ = await _call(_tools(runner, module, "wants_10_gb", run_in="process"), "wants_10_gb", {"a": 1})
    assert result.is_error
    assert "MemoryError" in result.text


async def test_what_a_tool_prints_is_no_result_and_fills_no_log(runner, module, capfd):
    result, _ = await _call(_tools(runner, module, "prints_100_mb", run_in="process"), "prints_100_mb", {"a": 1})
    assert result.text == "done"
    assert len(capfd.readouterr().err) < 1 << 20


async def test_a_huge_result_is_cut_or_refused(runner, module):
    result, _ = await _call(_tools(runner, module, "returns_100_mb"), "returns_100_mb", {"a": 1})
    assert len(result.text) < 10_000
    assert "characters left out" in result.text
    result, _ = await _call(_tools(runner, module, "returns_100_mb", run_in="process"), "returns_100_mb", {"a": 1})
    assert result.is_error


@pytest.mark.parametrize(
    ("name", "arguments", "reported"),
    [
        ("nothing", {}, "there is no tool 'nothing'; there are: add"),
        ("\udce9" * 1000, {}, "there is no tool '?"),
        ("add", {}, "missing argument 'a'"),
        ("add", {"a": "1"}, "expected integer"),
        ("add", {"a": 1, "c": 2}, "unknown argument 'c'; it takes: a, b"),
        ("add", {"a": "\ud800"}, "UTF-8"),
        ("add", {"a": "é" * (MAX_ARGUMENT_CHARS // 2)}, f"the arguments have {MAX_ARGUMENT_CHARS + 9} bytes; "),
    ],
)
async def test_calls_that_make_no_sense_are_told_so(runner, module, name, arguments, reported):
    result, metrics = await _call(_tools(runner, module, "add"), name, arguments)
    assert result.is_error
    assert reported in result.text
    assert len(result.text.encode()) < 1100
    counted = "add" if name == "add" else "unknown"
    assert metrics[f"tool/{counted}/errors"] == 1


async def test_arguments_of_settings_and_samples_reach_a_function(runner, module):
    for run_in in ("thread", "process"):
        tools = _tools(runner, module, "scaled", run_in=run_in)
        assert (await _call(tools, "scaled", {"a": 2}, tool_args={"scaled": {"factor": 3}}))[0].text == "6"
        assert " no value for the argument 'factor'" in (await _call(tools, "scaled", {"a": 2}))[0].text
        tools = _tools(runner, module, "scaled", run_in=run_in, args={"factor": 5})
        assert (await _call(tools, "scaled", {"a": 2}))[0].text == "10"


@pytest.mark.parametrize("run_in", ["thread", "process"])
async def test_a_function_names_its_arguments_as_it_likes(runner, module, run_in):
    row = {"tools_kwargs": {"runs": {"execute_kwargs": {"given": "c", "tool": "d"}}}}
    tools = _tools(runner, module, "runs", run_in=run_in)
    assert (await _call(tools, "runs", {"code": "a", "function": "b"}, **row))[0].text == "abcd"


async def test_a_class_keeps_what_belongs_to_a_sample_until_its_end(runner, module):
    tools = _tools(runner, module, "Counter")
    live = type(tools.toolbox.tools["counter"].tool).live
    async with (
        tools.toolbox.session({"tool_args": {"counter": {"start": 10}}}) as one,
        tools.toolbox.session({}) as two,
    ):
        assert (await one.call(ToolCall("a", "counter", {}))).text == "11"
        results = await asyncio.gather(*(two.call(ToolCall(str(n), "counter", {"by": 2})) for n in range(3)))
        assert sorted(int(result.text) for result in results) == [2, 4, 6]
        assert len(live) == 2
        assert await one.rewards() == {"tool/counter": pytest.approx(0.6)}
        assert await two.rewards() == {"tool/counter": pytest.approx(0.8)}
        assert two.metrics["tool/counter/by"] == 3
    assert not live


GSM8K_OF_VERL = {
    "data_source": "openai/gsm8k",
    "extra_info": {
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "told": {
                "create_kwargs": {"ground_truth": "72"},
                "execute_kwargs": {"unit": "m"},
                "calc_reward_kwargs": {"bonus": 0.5},
                "release_kwargs": {"why": "end"},
            },
            "add": None,
        },
    },
}
"""A row as verl's `gsm8k_multiturn_w_tool.py` writes them, after a round through Parquet."""


async def test_a_row_in_verls_form_gives_each_method_its_arguments(runner, module):
    tools = _tools(runner, module, "Told", "add")
    reported = tools.toolbox.tools["told"].tool.calls
    async with tools.toolbox.session(GSM8K_OF_VERL) as session:
        assert (await session.call(ToolCall("a", "told", {}))).text == "72 m"
        assert await session.rewards() == {"tool/told": 0.5}
    assert reported == [
        ("create", {"ground_truth": "72"}),
        ("calc_reward", {"bonus": 0.5}),
        ("release", {"why": "end"}),
    ]


@pytest.mark.parametrize("run_in", ["thread", "process"])
async def test_a_function_takes_what_the_row_gives_to_its_calls(runner, module, run_in):
    tools = _tools(runner, module, "scaled", run_in=run_in)
    given = {"scaled": {"create_kwargs": {"factor": 3}, "execute_kwargs": {"factor": 4}}}
    assert (await _call(tools, "scaled", {"a": 2}, tools_kwargs=given))[0].text == "8"
    given = {"scaled": {"execute_kwargs": {"faktor": 4}}}
    assert "has no argument 'faktor'" in (await _call(tools, "scaled", {"a": 2}, tools_kwargs=given))[0].text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tool_args": {"scald": {"factor": 3}}}, r"tool_args names 'scald', which is not a tool; there are: scaled"),
        (
            {"tools_kwargs": {"scaled": {"factor": 3}}},
            r"tools_kwargs\['scaled'\] has 'factor'; it may have",
        ),
        ({"tools_kwargs": {"scaled": {"create_kwargs": 3}}}, r"\['scaled'\]\.create_kwargs is a int; it is a mapping"),
        ({"extra_info": {"tools_kwargs": [1]}}, r"extra_info\.tools_kwargs is a list; it is a mapping"),
        (
            {"tool_args": {"scaled": {"factor": 3}}, "tools_kwargs": {"scaled": {"create_kwargs": {"factor": 3}}}},
            r"tools_kwargs has arguments for 'scaled', which it has elsewhere too",
        ),
    ],
)
async def test_arguments_of_a_row_that_reach_no_tool_are_an_error(runner, module, row, message):
    with pytest.raises(ValueError, match=message):
        _tools(runner, module, "scaled").toolbox.session(row)


async def test_a_tool_that_was_not_called_is_neither_begun_nor_rewarded(runner, module):
    async with _tools(runner, module, "Counter").toolbox.session({}) as session:
        assert await session.rewards() == {}
        assert session.metrics == {}


async def test_a_reward_that_fails_fails_the_sample(runner, module):
    tools = _tools(runner, module, "BadReward")
    async with tools.toolbox.session({}) as session:
        assert "not finite" in (await session.call(ToolCall("a", "bad_reward", {}))).text
        with pytest.raises((ToolFailure, UserCodeError), match="no reward"):
            await session.rewards()


async def test_the_rollouts_metrics_are_means_over_samples_that_used_tools(runner, module):
    tools = _tools(runner, module, "add")
    with metered() as meter:
        for calls in (1, 3, 0):
            async with tools.toolbox.session({}) as session:
                for _ in range(calls):
                    await session.call(ToolCall("a", "add", {"a": 1}))
    assert meter.metrics()["tool/add/calls"] == 2.0
    assert meter.metrics()["rollout/tool_s"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([{"path": "{module}:nothing"}], "defines no 'nothing'"),
        ([{"path": "{module}:NOT_A_TOOL"}], "it is a int"),
        ([{"path": "{module}:Unready"}], "OSError: no licence"),
        ([{"path": "{module}:Counter", "run_in": "process"}], "run_in=process is for functions"),
        ([{"path": "{module}:later", "run_in": "thread"}], "leave it at auto"),
        ([{"path": "{module}:add"}, {"path": "{module}:add"}], "both called 'add'"),
        ([{"path": "{module}:add", "name": "later"}, {"path": "{module}:later"}], "both called 'later'"),
        ([{"path": "builtins:dict"}], "asyncrl.api.Tool"),
    ],
)
async def test_a_tool_that_cannot_be_loaded_is_refused_by_its_setting(runner, module, settings, message):
    configs = [ToolConfig(**{**each, "path": each["path"].format(module=module)}) for each in settings]
    with pytest.raises(ConfigError, match=r"tools\[[01]\]") as caught:
        RunTools(configs, (), runner)
    assert message in str(caught.value)


def _problems(text: str) -> list[str]:
    merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), OmegaConf.create(text))
    config: Any = OmegaConf.to_object(merged)
    return list(check(config)) or list(code_problems(config))


AGENT = "agent: {path: 'asyncrl.plugins.agents.tool_agent:ToolAgent'}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.calculator:calculator'}]", None),
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.python:PythonTool', args: {cpu_s: 2.0}}]", None),
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.python:PythonTool', args: {cpu: 2.0}}]", "no parameter 'cpu'"),
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.calculator:calculator', args: {expression: x}}]", "after `*`"),
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.calculator:calc'}]", "defines no 'calc'"),
        (AGENT + "tools: [{path: 'math:hypot'}]", "tools[0].path='math:hypot': its parameters cannot be read"),
        (
            AGENT + "tools: [{path: 'asyncrl.plugins.tools.calculator:calculator', timeout_s: 0}]",
            "tools[0].timeout_s=0",
        ),
        (AGENT + "tools: [{path: 'asyncrl.plugins.tools.calculator:calculator', name: 'a b'}]", "tools[0].name='a b'"),
        ("tools: [{path: 'asyncrl.plugins.tools.calculator:calculator'}]", "this agent calls no tools"),
        (f"eval: {{{AGENT.strip()}}}\ntools: [{{path: 'asyncrl.plugins.tools.calculator:calculator'}}]", None),
        (AGENT + "mcp: [{name: s, command: python3, args: [server.py]}]", None),
        (AGENT + "mcp: [{name: s}]", "give one of them"),
        (AGENT + "mcp: [{name: s, command: python3, url: 'http://h/mcp'}]", "give one of them"),
        (AGENT + "mcp: [{command: python3}]", "mcp[0].name=''"),
        (AGENT + "mcp: [{name: s, command: no-such-program}]", "is it installed"),
        (AGENT + "mcp: [{name: s, url: 'localhost:8000'}]", "no HTTP address"),
        (AGENT + "mcp: [{name: s, url: 'http://h/mcp', args: [x]}]", "mcp[0].args"),
        (AGENT + "mcp: [{name: s, url: 'http://a/mcp'}, {name: s, url: 'http://b/mcp'}]", "mcp[1].name='s'"),
    ],
)
def test_settings_are_checked_before_the_start(text, message):
    problems = _problems(text)
    assert (problems == []) if message is None else (len(problems) == 1 and message in problems[0])


HERMES = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}.{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    ("source", "parser", "message"),
    [
        (HERMES, "auto", None),
        (HERMES, "hermes", None),
        (None, "auto", "no chat template"),
        (HERMES, "xml", "parser=xml: .* it does not read the calls that the chat template writes; use auto, or hermes"),
        (HERMES.replace("tojson", "string"), "auto", "from which no format reads the same call again"),
        (HERMES.replace("m.tool_calls or", "[] or"), "auto", "leaves calls out of the conversation"),
        (HERMES.replace("{{ tools }}", ""), "auto", "does not show the model any tools"),
        (HERMES, "none", "none of their calls would be read"),
    ],
)
def test_a_model_that_cannot_be_told_of_the_tools_is_refused(source, parser, message):
    config = ExperimentConfig(tools=[ToolConfig(path="asyncrl.plugins.tools.calculator:calculator")])
    config.rollout.chat.parser = parser
    check_format(ExperimentConfig(), None)
    chat = None if source is None else ChatTemplate(source, {})
    if message is None:
        check_format(config, chat)
    else:
        with pytest.raises(ConfigError, match=message):
            check_format(config, chat)


async def test_tools_of_servers_that_are_not_connected_yet_are_not_left_out_silently(runner):
    tools = RunTools((), [McpServerConfig(name="s", command="python")], runner)
    with pytest.raises(RuntimeError, match="MCP servers are connected"):
        _ = tools.toolbox.schemas
    with pytest.raises(RuntimeError, match="MCP servers are connected"):
        tools.toolbox.session({})


async def test_a_cancellation_during_a_release_skips_no_release_and_no_report():
    releasing, released = asyncio.Event(), []

    def first(a: int) -> int:
        """First."""
        return a

    def second(a: int) -> int:
        """Second."""
        return a

    async def host(method: Any, *args: Any, **kwargs: Any) -> Any:
        value = method(*args, **kwargs)
        if method.__name__ == "release":
            releasing.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            released.append(method.__self__.name)
        return await value if asyncio.iscoroutine(value) else value

    reported: list[Any] = []
    tools = [HostedTool(as_tool(function), function.__name__, host, 100) for function in (first, second)]
    toolbox = Toolbox(tools, reported.append)

    async def sample() -> None:
        async with toolbox.session({}) as session:
            for name in ("first", "second"):
                assert not (await session.call(ToolCall("1", name, {"a": 1}))).is_error

    task = asyncio.create_task(sample())
    await asyncio.wait_for(releasing.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert released == ["first", "second"]
    assert [metrics["tool/second/calls"] for metrics in reported] == [1]


async def test_a_tool_that_is_still_created_when_the_sample_is_cancelled_is_released_afterwards():
    """A cancelled `create` would continue in its thread, and nothing would release what it makes."""
    creating, create, done = threading.Event(), threading.Event(), list[str]()

    class Sandbox(Tool):
        name = "sandbox"

        def schema(self) -> Any:
            return as_tool(lambda: 0, "sandbox").schema()

        def create(self, instance_id: str) -> None:
            creating.set()
            create.wait(10)
            done.append("created")

        def release(self, instance_id: str) -> None:
            done.append("released")

    async def host(method: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(method, *args, **kwargs)

    toolbox = Toolbox([HostedTool(Sandbox(), "sandbox", host, 100)])

    async def sample() -> None:
        async with toolbox.session({}) as session:
            await session.call(ToolCall("1", "sandbox", {}))

    task = asyncio.create_task(sample())
    assert await asyncio.to_thread(creating.wait, 10)
    task.cancel()
    assert not (await asyncio.wait({task}, timeout=0.05))[0]
    create.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert done == ["created", "released"]
