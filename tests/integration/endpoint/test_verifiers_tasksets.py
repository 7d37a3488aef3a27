"""The examples of experiments/recipes for tasksets of other people's, in `verifiers` 0.4 and with its own harness."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.api.chat import ToolCall, ToolSchema
from asyncrl.chat.parsers import Parsed
from asyncrl.chat.template import ChatFormat
from asyncrl.config.load import load_experiment
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, special_tokens
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents.verifiers_env import VerifiersDataset

from ...warm import Template, forked
from .conftest import CHATML
from .test_verifiers import IMPORTED, V1, World

RECIPES = Path(__file__).parents[3] / "experiments" / "recipes"
pytestmark = [pytest.mark.verifiers, pytest.mark.skipif(not V1, reason="no verifiers 0.4")]


def has(package: str) -> bool:
    """True if the environment of verifiers 0.4 has the package."""
    return any(Path(V1).parent.parent.glob(f"lib/python*/site-packages/{package}"))


class Called:
    """`CALL {...}` calls the first tool with these arguments."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        if not tools or not text.startswith("CALL "):
            return Parsed(text, None, (), 0)
        call = ToolCall("1", tools[0]["function"]["name"], json.loads(text.removeprefix("CALL ")))
        return Parsed("", None, (call,), 0)


@pytest_asyncio.fixture
async def world(tokenizer_folder: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("PATH", os.defpath)  # uv is beside the interpreter
    template = ChatTemplate(CHATML, special_tokens(tokenizer_folder))
    form = PromptFormat(load_tokenizer(tokenizer_folder), template, 4096)
    made = World(ChatFormat(form, Called()), endpoint)
    yield made
    for agent in made.agents:
        await agent.close()


@pytest.fixture(scope="module")
def python(template: Template | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with forked(template, V1, IMPORTED[V1], tmp_path_factory.mktemp("python")) as python:
        yield python


@contextlib.contextmanager
def served(program: str) -> Iterator[str]:
    """Run a recipe's server on a port of its own; return its URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([V1, str(RECIPES / program), str(port)]) as process:
        try:
            waits = f"import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', {port})): time.sleep(0.05)"
            subprocess.run([sys.executable, "-I", "-S", "-c", waits], timeout=300, check=True)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def args_of(recipe: str, url: str) -> dict[str, Any]:
    """The arguments of the recipe's agent, with its server at `url`."""
    config: Any = load_experiment(recipe, [])
    text = re.sub(r"http://127\.0\.0\.1:\d+", url, json.dumps(config.agent.args))
    args: dict[str, Any] = json.loads(text)
    return args


async def play(world: World, python: str, args: dict[str, Any], row: int, *texts: str) -> Any:
    agent = world.agent(**args | {"python": python})
    (sample,) = await world.run(agent, args["env"], row, *texts)
    assert [turns.removesuffix("<|im_end|>") for turns in world.says(sample)[1::2]] == list(texts)
    assert world.endpoint.refused == {}
    return sample


@pytest.mark.skipif(not has("openenv"), reason="no openenv beside verifiers 0.4")
async def test_a_game_of_an_openenv_server(world: World, python: str) -> None:
    with served("verifiers_openenv_server.py") as url:
        args = args_of("verifiers_openenv", url)
        rows = VerifiersDataset(split="train", seed=0, **args | {"python": python})
        assert (len(rows), rows.row(1)["prompt"]) == (8, f"{url}#1"), "the environment speaks first"
        sample = await play(world, python, args, 0, "7", "a moon, a car")
    assert "rhymes with" in world.says(sample)[0]
    assert "begins with" in world.says(sample)[2]
    assert sample.reward == 1.0


async def test_a_tool_and_a_verdict_of_a_nemo_gym_server(world: World, python: str) -> None:
    with served("verifiers_nemo_gym_server.py") as url:
        args = args_of("verifiers_nemo_gym", url)
        sample = await play(world, python, args, 1, 'CALL {"city": "Oslo"}', "It is rainy.")
    assert '{"weather": "rainy"}' in world.says(sample)[2]
    assert (sample.reward, sample.metrics["asked"]) == (1.0, 1.0)
