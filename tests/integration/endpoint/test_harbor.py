"""Trials of Harbor in an environment that has it, with an agent and a box of one's own in place of containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.chat.template import ChatFormat
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents.harbor import HarborAgent, HarborDataset
from asyncrl.plugins.agents.verifiers_env import VerifiersError

from .test_verifiers import V1, World
from .test_verifiers_tasksets import RECIPES, has

pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.skipif(not V1 or not has("harbor"), reason="no harbor beside verifiers 0.4 (needs Python 3.12)"),
]
BOXES = """
import asyncio, shutil, tempfile
from pathlib import Path

import openai
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult


class Folder(BaseEnvironment):
    "A folder of this machine that stands for a container's file system."

    @staticmethod
    def type():
        return "folder"

    def _validate_definition(self):
        pass

    def at(self, path):
        return f"{self.root}{path}"

    async def start(self, force_build):
        self.root = tempfile.mkdtemp()
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests"):
            Path(self.root, name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root)

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self.at(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self.at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self.at(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        for name in ("/logs", "/tests", "/app"):
            command = command.replace(name, self.at(name))
        for file in Path(self.root, "tests").glob("*.sh"):
            file.write_text(file.read_text().replace("> /logs", f"> {self.root}/logs"))
        where = {"cwd": self.at(cwd or "/app"), "stdout": -1, "stderr": -1}
        shell = await asyncio.create_subprocess_exec("sh", "-c", command, **where)
        out, err = await shell.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=shell.returncode)


class Asks(BaseAgent):
    def __init__(self, *args, base_url, api_key, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    @staticmethod
    def name():
        return "asks"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        answer = await self.policy.chat.completions.create(model=self.model_name, messages=messages)
        if answer.choices[0].message.content == "raise":
            raise RuntimeError("the agent is lost")
        await environment.exec(answer.choices[0].message.content)
"""


@pytest_asyncio.fixture
async def world(chat: ChatFormat, endpoint: Endpoint) -> AsyncIterator[World]:
    made = World(chat, endpoint)
    yield made
    for agent in made.agents:
        await agent.close()


async def test_a_trial_is_an_episode_with_its_verifiers_reward(world: World, tmp_path: Path) -> None:
    (tmp_path / "boxes.py").write_text(BOXES)
    own = {"base_url": "{base_url}", "api_key": "{api_key}"}
    trial = {
        "path": str(tmp_path),
        "agent": {"import_path": "boxes:Asks", "kwargs": own},
        "environment": {"import_path": "boxes:Folder"},
    }
    given: dict[str, Any] = {"python": V1, "tasks": str(RECIPES / "verifiers_harbor"), "trial": trial}
    rows = HarborDataset(split="train", seed=0, **given)
    assert "the word house" in rows.row(1)["prompt"]
    with pytest.raises(ValueError, match="no held-out rows"):
        HarborDataset(split="held_out", seed=0, **given)
    agent = HarborAgent(**given)
    world.agents.append(agent)
    right = world.run(agent, Path(given["tasks"]), 1, "echo house > made.txt")
    wrong = world.run(agent, Path(given["tasks"]), 1, "echo mouse > made.txt")
    raises = world.run(agent, Path(given["tasks"]), 0, "raise")
    (made,), (other,), error = await asyncio.gather(right, wrong, raises, return_exceptions=True)
    assert "with the word house" in world.says(made)[0]
    assert (made.reward, made.reward_parts, other.reward) == (1.0, {"reward": 1.0}, 0.0)
    assert isinstance(error, VerifiersError)
    assert "RuntimeError: the agent is lost" in str(error)
    assert world.endpoint.refused == {}
