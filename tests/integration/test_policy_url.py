"""A policy on a generation server that somebody else runs: a real embedded server, asked through a run's manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.api.generation import GenerationRequest, SamplingParams
from asyncrl.comm import names
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE, SECRET_FILE, write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.data.datasets import DataRecord
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import Server, serve
from asyncrl.inference.process import PolicyServer
from asyncrl.launch.before_start.machine import check_reachable
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.process import GserverManager
from asyncrl.manager.settings import PolicyConfig
from asyncrl.rollout.generation_servers import ServerCapabilities
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.runtime.process.worker import AsyncWorker, WorkerSpec
from asyncrl.trainer.settings import TeacherConfig

LIMIT_S = 300.0
LABEL = "somebody's own"
REQUEST = GenerationRequest("q", (5, 6, 7), 2, SamplingParams(max_new_tokens=6, seed=3), policy="judge")


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    return Qwen2ForCausalLM(config).eval()


def started(model: Qwen2ForCausalLM, folder: Path, label: str = LABEL) -> GenerationEngine:
    engine = GenerationEngine(model, max_running_requests=4, weight_version=label, model_path=str(folder))
    engine.start()
    return engine


def saved_tokenizer(folder: Path, symbols: str = "0123456789+=;#") -> Path:
    folder.mkdir()
    CharTokenizer(symbols).save(folder)
    return folder


def config_of(url: str, model: Path) -> ExperimentConfig:
    config = ExperimentConfig(policies=[PolicyConfig("judge", url=url)])
    config.model.path = str(model)
    config.manager.health_interval_s = 0.05
    config.system.lease_s = LIMIT_S
    return config


class InRun:
    """The manager and the policy's server process of a run with a secret, in this loop."""

    def __init__(self, run_dir: Path, config: ExperimentConfig) -> None:
        run_dir.mkdir()
        write_run_config(config, run_dir)
        RunSecret.create(run_dir / SECRET_FILE)
        DataRecord(10).write(run_dir / DATA_RECORD_FILE)
        self.manager = GserverManager(WorkerSpec("gserver_manager", 0, run_dir))
        self.server = PolicyServer(WorkerSpec("policy_server", 0, run_dir))
        self._workers: list[AsyncWorker] = [self.manager, self.server]
        for worker in self._workers:
            worker.stop = asyncio.Event()
        self._tasks = [asyncio.create_task(worker.main()) for worker in self._workers]

    async def client(self) -> ManagerClient:
        url = await asyncio.to_thread(self.server.resolver.wait, names.MANAGER_KEY, LIMIT_S)
        return ManagerClient(url, "rollout_worker/0", self.server.http_security)

    async def until(self, condition: Callable[[str], bool]) -> None:
        """Wait until `condition` holds of the state of the policy's server."""
        runner = self.manager._fleets._fleets["judge"]
        async with asyncio.timeout(LIMIT_S):
            while not condition(next((status.state for status in runner.status()), "")):
                await runner.changed.wait(0.2)

    async def close(self) -> None:
        for worker in self._workers:
            worker.stop.set()
        await asyncio.gather(*self._tasks)
        for worker in self._workers:
            worker.resolver.close()


async def test_a_server_of_somebody_else_answers_as_version_0_is_never_updated_and_is_taken_back(
    model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    folder = saved_tokenizer(tmp_path / "model")
    engine = started(model, folder)
    server: Server = await serve(engine)
    run = InRun(tmp_path / "run", config_of(server.url, folder))
    client = await run.client()
    settings: dict[str, Any] = {"security": run.server.http_security, "max_concurrent": 2, "request_timeout_s": LIMIT_S}
    async with RolloutClient(client, ServerCapabilities(frozen=["judge"]), **settings) as rollouts:
        first = (await rollouts.generate(REQUEST)).completions
        assert [answer.versions for answer in first] == [[0] * 6] * 2
        assert {answer.policy for answer in first} == {"judge"}
        assert engine.weight_version == LABEL
        assert run.manager._fleets.served_version() is None
        with pytest.raises(ValueError, match="'judge': a server of somebody else has no allowed_token_ids"):
            await rollouts.generate(replace(REQUEST, sampling=replace(REQUEST.sampling, allowed_token_ids=(3,))))
        scores = (await rollouts.generate(replace(REQUEST, score_from=1))).scores
        logits = model(torch.tensor([REQUEST.input_ids])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(REQUEST.input_ids[1:])[:, None])[:, 0]
        assert scores == pytest.approx(expected.tolist(), abs=1e-5), "as a teacher it scores at temperature 1"
        await server.close()
        await run.until(lambda state: state == "quarantined")
        waiting = asyncio.create_task(rollouts.generate(REQUEST))
        server = await serve(engine, port=urlsplit(server.url).port or 0)
        again = (await waiting).completions
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
        await run.until(lambda state: state == "serving")
    await client.close()
    await run.close()
    await server.close()
    engine.close()


async def test_before_the_start_such_a_server_is_asked_for_its_tokenizer(
    model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    served, other = saved_tokenizer(tmp_path / "served"), saved_tokenizer(tmp_path / "other", "abcdefghijklmn")
    engine = started(model, served)
    server = await serve(engine)

    async def found(model: Path, teachers: Sequence[TeacherConfig] = ()) -> list[str]:
        config = config_of(server.url, model)
        config.algorithm.teachers = list(teachers)
        return await asyncio.to_thread(check_reachable, config)

    assert await found(served) == []
    with pytest.raises(ConfigError, match=r"policies: 'judge': url=.*its tokenizer is not the one of model.path="):
        await found(other)
    (note,) = await found(tmp_path / "nowhere")
    assert "its tokenizer was not compared with that of the run's model" in note
    teachers = [TeacherConfig("big", policy="judge")]
    assert await found(served, teachers) == []
    with pytest.raises(ConfigError, match=r"a teacher scores the policy's tokens.*copy that folder to this machine"):
        await found(tmp_path / "nowhere", teachers)
    await server.close()
    with pytest.raises(ConfigError, match=r"policies: 'judge': url=.*no generation server answers there"):
        await found(served)
    server = await serve(engine, token="a key of theirs")
    with pytest.raises(ConfigError, match=r"policies: 'judge': url=.*asks for a token.*start it without --api-key"):
        await found(served)
    await server.close()
    engine.close()
