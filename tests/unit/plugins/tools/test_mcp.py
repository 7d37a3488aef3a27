"""Tools of MCP servers by the real `mcp` package, over stdio and HTTP; a dead one comes back, none is left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.api import ToolCall
from asyncrl.comm.waits import CLOSE_S, STOP_S
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.settings import McpServerConfig
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code.tools import RunTools
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner
from asyncrl.runtime.process.waiting import LEAVE_LIMIT_S

pytest.importorskip("mcp")

LIMIT_S = 300.0
SERVER = """
import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("calc")


@server.tool()
async def add(a: int, b: int = 1) -> int:
    "Adds two numbers."
    return a + b


@server.tool()
async def slow(begun: str) -> str:
    open(begun, "w").close()
    await asyncio.sleep(600)


@server.tool()
def dies() -> str:
    os._exit(3)


@server.tool()
def fails() -> str:
    raise ValueError("boom")


@server.tool()
def talks() -> int:
    for _ in range(20):
        sys.stderr.write("x" * (1 << 20))
    return os.getpid()


@server.tool()
def draws(form: str) -> list:
    import io

    from PIL import Image as Drawing

    file = io.BytesIO()
    Drawing.new("RGB", (6, 4), (255, 0, 0)).save(file, form)
    return ["look", Image(data=file.getvalue(), format=form.lower())]


if len(sys.argv) > 1:
    import socket

    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listening])
else:
    server.run("stdio")
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to end a server than a worker that stops may wait."""
    monkeypatch.setattr("asyncrl.rollout.user_code.tools.CLOSE_S", LIMIT_S)


@pytest.fixture
def server(tmp_path: Path) -> str:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return str(file)


@pytest.fixture
async def runner():
    async with UserCodeRunner(UserCodeConfig()) as made:
        yield made


def _over_stdio(server: str, python: str = sys.executable, **settings) -> McpServerConfig:
    limits = {"timeout_s": LIMIT_S, "start_timeout_s": LIMIT_S}
    return McpServerConfig(name="calc", command=python, args=[server], **limits, **settings)


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _left(before: set[int]) -> list[psutil.Process]:
    """Those that were started since `before` and do not end."""
    started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    return psutil.wait_procs(started, timeout=LIMIT_S)[1]


async def _call(tools: RunTools, name: str, arguments: dict) -> str:
    async with tools.toolbox.session({}) as session:
        return (await session.call(ToolCall("id", name, arguments))).text


async def test_a_server_over_stdio_serves_many_samples_and_is_gone_afterwards(runner, server):
    before = _children()
    async with RunTools((), [_over_stdio(server, tools=["add", "fails", "talks"])], runner) as tools:
        assert [schema["function"]["name"] for schema in tools.toolbox.schemas] == ["add", "fails", "talks"]
        assert tools.toolbox.schemas[0]["function"]["description"] == "Adds two numbers."
        results = await asyncio.gather(*(_call(tools, "add", {"a": number}) for number in range(50)))
        assert results == [str(number + 1) for number in range(50)]
        assert (await _call(tools, "add", {"a": "x"})).startswith("Error: ")
        assert (await _call(tools, "fails", {})).startswith("Error: ")
        assert int(await _call(tools, "talks", {})) in _children() - before
    assert _left(before) == []


async def test_pictures_of_a_server_are_pictures(runner, server, warm_python):
    async with (
        RunTools((), [_over_stdio(server, warm_python, tools=["draws"])], runner) as tools,
        tools.toolbox.session({}) as session,
    ):
        result = await session.call(ToolCall("a", "draws", {"form": "PNG"}))
        (picture,) = result.pictures
        assert (result.text, picture.size, picture.pixels()[0, 0].tolist()) == ("look", (6, 4), [255, 0, 0])
        other = await session.call(ToolCall("b", "draws", {"form": "GIF"}))
        assert other.pictures == ()
        assert other.text == "look\n[image: the picture is GIF: give PNG or JPEG]"


async def test_a_server_that_dies_costs_a_call_and_is_started_again(runner, server, warm_python):
    before = _children()
    async with RunTools((), [_over_stdio(server, warm_python, tools=["add", "dies"])], runner) as tools:
        for _ in range(2):
            assert (await _call(tools, "dies", {})).startswith("Error: ")
            assert await _call(tools, "add", {"a": 1}) == "2"
    assert _left(before) == []


async def test_a_call_that_hangs_ends_at_its_limit_and_others_go_on(runner, server, tmp_path, warm_python):
    config, begun = _over_stdio(server, warm_python, tools=["add", "slow"]), tmp_path / "begun"
    async with RunTools((), [config], runner) as tools:
        hanging = asyncio.create_task(_call(tools, "slow", {"begun": str(begun)}))
        async with asyncio.timeout(LIMIT_S):
            while not begun.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await _call(tools, "add", {"a": 1}) == "2"
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        config.timeout_s = 0.5
        assert "did not answer within 0.5 s" in await _call(tools, "slow", {"begun": str(begun)})
        config.timeout_s = LIMIT_S
        assert await _call(tools, "add", {"a": 2}) == "3"


async def test_a_server_over_http_is_called_the_same_way(runner, server, warm_python):
    command = [warm_python, server, "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            url = f"http://127.0.0.1:{port}/mcp"
            configs = [
                McpServerConfig(
                    name=name, url=url, prefix=f"{name}_", tools=["add"], headers={"X-Mine": "1"}, timeout_s=LIMIT_S
                )
                for name in ("one", "two")
            ]
            async with RunTools((), configs, runner) as tools:
                assert await _call(tools, "one_add", {"a": 1}) == "2"
                assert await _call(tools, "two_add", {"a": 1, "b": 5}) == "6"
                process.kill()
                await asyncio.to_thread(process.stdout.read)  # it has gone, not only its stand-in
                assert (await _call(tools, "one_add", {"a": 1})).startswith("Error: ")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"command": sys.executable, "args": ["/no/such/file.py"]},
            r"mcp\[0\]: mcp server 'calc' did not start.*its stderr ends: .*can't open file '/no/such/file.py'",
        ),
        ({"tools": ["nothing"]}, r"mcp\[0\]: mcp server 'calc' has no tool 'nothing'; it has: add"),
    ],
)
async def test_a_server_that_does_not_serve_is_refused_at_the_start(runner, server, change, message, warm_python):
    before = _children()
    config = _over_stdio(server, warm_python)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        async with RunTools((), [config], runner):
            pass
    assert _left(before) == []


async def test_two_tools_of_one_name_are_refused(runner, server, warm_python):
    configs = [_over_stdio(server, warm_python, tools=["add"]) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"mcp\[1\].prefix=''.*both called 'add'"):
        async with RunTools((), configs, runner):
            pass


STUBBORN = """
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=threading.Event().wait).start()  # stdin's end is no end of it
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_does_not_end_delays_the_worker_no_longer_than_a_connection_may(
    runner, server, caplog, monkeypatch
):
    monkeypatch.setattr("asyncrl.rollout.user_code.tools.CLOSE_S", CLOSE_S)
    stubborn = Path(server).with_name("stubborn.py")
    stubborn.write_text(STUBBORN + SERVER)
    async with RunTools((), [_over_stdio(str(stubborn), tools=["talks"])], runner) as tools:
        program = psutil.Process(int(await _call(tools, "talks", {})))
    assert f"did not close within {CLOSE_S / 2:g} s" in caplog.text
    assert program.is_running()
    program.kill()
    del tools
    await asyncio.sleep(0)
    gc.collect()  # the package leaves the pipes of a program that outlives its connection to the collector


def test_all_that_a_rollout_worker_closes_fits_into_the_time_that_a_process_has_to_stop():
    assert 5 * CLOSE_S < LEAVE_LIMIT_S < STOP_S


CONTENT = """
import base64
import mcp.types as t
from mcp.server.mcpserver import MCPServer

server = MCPServer("parts")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="


@server.tool()
def parts() -> list:
    blob = lambda uri, kind, data: t.EmbeddedResource(
        type="resource", resource=t.BlobResourceContents(uri=uri, mimeType=kind, blob=data)
    )
    return [
        t.TextContent(type="text", text="downloaded"),
        t.EmbeddedResource(
            type="resource", resource=t.TextResourceContents(uri="repo://r/a.md", text="THE FILE'S BODY")
        ),
        t.ResourceLink(type="resource_link", name="report", uri="file:///tmp/report.txt", description="the report"),
        blob("file:///x.bin", "application/octet-stream", "AAAA"),
        blob("file:///x.png", "image/png", PNG),
        t.AudioContent(type="audio", data="AAAA", mimeType="audio/wav"),
    ]


@server.tool()
def structured() -> t.CallToolResult:
    return t.CallToolResult(content=[], structuredContent={"twice": 4})


@server.tool()
def fails() -> t.CallToolResult:
    return t.CallToolResult(content=[t.TextContent(type="text", text="no such row")], isError=True)


@server.tool()
def folder() -> str:
    import os

    print("garbage on stdout", flush=True)
    return os.getcwd() + " " + os.environ["MINE"]


server.run("stdio")
"""


async def test_the_model_reads_all_parts_of_a_result(runner, tmp_path):
    (tmp_path / "parts.py").write_text(CONTENT)
    config = _over_stdio(str(tmp_path / "parts.py"), cwd=str(tmp_path), env={"MINE": "yes"})
    async with RunTools((), [config], runner) as tools, tools.toolbox.session({}) as session:
        result = await session.call(ToolCall("a", "parts", {}))
        assert result.text.splitlines() == [
            "downloaded",
            "THE FILE'S BODY",
            "[report: file:///tmp/report.txt the report]",
            "[file:///x.bin: data of application/octet-stream, which is not shown]",
            "[audio of the type audio/wav, which is not shown]",
        ]
        assert [picture.size for picture in result.pictures] == [(1, 1)]
        assert (await session.call(ToolCall("b", "structured", {}))).text == '{"twice": 4}'
        failed = await session.call(ToolCall("c", "fails", {}))
        assert (failed.text, failed.is_error) == ("Error: no such row", True)
        for name in ("d", "e"):  # a server that prints on its standard output, which is the protocol's
            assert (await session.call(ToolCall(name, "folder", {}))).text == f"{tmp_path} yes"


HANGS = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("stuck")


@server.tool()
async def query(a: int) -> int:
    if a == 0:
        time.sleep(600)  # blocks the server's event loop
    return a


server.run("stdio")
"""


async def test_a_server_that_hangs_is_started_again(runner, tmp_path, monkeypatch, warm_python):
    (tmp_path / "stuck.py").write_text(HANGS)
    config = _over_stdio(str(tmp_path / "stuck.py"), warm_python)
    async with RunTools((), [config], runner) as tools:
        assert await _call(tools, "query", {"a": 1}) == "1"
        config.timeout_s = 0.5
        assert "nor a ping after that; it is started again" in await _call(tools, "query", {"a": 0})
        config.timeout_s = LIMIT_S
        assert await _call(tools, "query", {"a": 2}) == "2"
        assert [server.starts for server in tools._servers] == [2]


async def test_a_server_that_never_serves_a_call_is_started_again_after_growing_pauses(runner, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.plugins.tools.mcp.FIRST_PAUSE_S", 5.0)
    (tmp_path / "dies.py").write_text(SERVER)
    config = _over_stdio(str(tmp_path / "dies.py"), tools=["dies", "add"])
    async with RunTools((), [config], runner) as tools:
        assert (await _call(tools, "dies", {})).startswith("Error: ")
        config.timeout_s = 1.0
        assert "was not there within 1 s" in await _call(tools, "dies", {})
        assert [server.starts for server in tools._servers] == [1]


SSE = SERVER.replace("streamable_http_app", "sse_app")


async def test_a_server_over_sse_is_called_the_same_way(runner, tmp_path):
    (tmp_path / "sse.py").write_text(SSE)
    command = [sys.executable, str(tmp_path / "sse.py"), "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            config = McpServerConfig(name="one", url=f"http://127.0.0.1:{port}/sse", tools=["add"], timeout_s=LIMIT_S)
            async with RunTools((), [config], runner) as tools:
                assert await _call(tools, "add", {"a": 1}) == "2"
        finally:
            process.kill()
