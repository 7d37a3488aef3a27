"""The GserverManager with name resolution, weights on disk and three servers that fail in different ways."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.api.generation import GenerationRequest, SamplingParams
from asyncrl.comm import names
from asyncrl.comm.ended_rollouts import RolloutCounts
from asyncrl.comm.waits import Backoff
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE, LEDGER_DIR, write_run_config
from asyncrl.config.setting import Dtype
from asyncrl.data.datasets import DataRecord
from asyncrl.data.prompt_queue import DataOrder, UsedPrompts
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import serve
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import DISAGREEMENTS_ALLOWED
from asyncrl.manager.messages import (
    ConsumedReport,
    FinishedRollout,
    GateCheckpoint,
    GrantedRollout,
    ReceivedReport,
    ReceivedRollout,
    Route,
    RouteRequest,
    RunBegin,
    ServerStatus,
)
from asyncrl.manager.process import GserverManager, manager_registry
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.ranks import Ranks
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.runtime.process.worker import CannotContinue, WorkerSpec
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.weights.folder_tensors import WholeModel
from asyncrl.weights.logprob_probe import PROBE_FILE, LogprobProbe, encode_probe, probe_tokens
from asyncrl.weights.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    checksum,
    file_entry,
    write_manifest,
)
from asyncrl.weights.publishing import SharedFiles, publish

ROWS = 1000
LIMIT_S = 300.0
"""Time limit in seconds of waits for what must come, and for leases without an owner: a machine may stand still for
seconds.
"""


class Run:
    """A GserverManager in this loop, in a run's folder of its own, with what a test does around it."""

    def __init__(self, run_dir: Path, config: ExperimentConfig) -> None:
        write_run_config(config, run_dir)
        DataRecord(ROWS).write(run_dir / DATA_RECORD_FILE)
        self.dir = run_dir
        self.manager = GserverManager(WorkerSpec("gserver_manager", 0, run_dir))
        self.manager.stop = asyncio.Event()
        self.resolver = self.manager.resolver
        self.task = asyncio.create_task(self.manager.main())
        self.clients: list[ManagerClient] = []

    def begin(self, version: int = 0, used: Iterable[str] = (), **known: Any) -> None:
        """Bring the checkpoint, as the master does."""
        begin = RunBegin(version, GateCheckpoint(used=UsedPrompts(used).to_json(), **known))

        async def bring() -> None:
            await (await self.client("master_worker/0")).call(begin)

        self.bringing = asyncio.create_task(bring())

    async def client(self, worker: str = "rollout_worker/0") -> ManagerClient:
        url = await asyncio.to_thread(self.resolver.wait, names.MANAGER_KEY, LIMIT_S)
        self.clients.append(ManagerClient(url, worker, None))
        return self.clients[-1]

    def register(self, index: int, server: Any) -> None:
        value = names.GenerationServerEntry(server.url, 1, 0).encode()
        self.resolver.add(names.gen_server_key(index), value, lease_s=LIMIT_S, replace=True)

    def weights(self, version: int, shape: tuple[int, ...] = (2,), probe: LogprobProbe | None = None) -> Path:
        """A folder as the trainer publishes it."""
        folder = self.dir / "weights" / f"v{version}"
        folder.mkdir(parents=True)
        file = folder / "model.safetensors"
        file.write_bytes(b"weights" + bytes([version]))
        files = {file.name: FileEntry(file.stat().st_size, checksum(file))}
        if probe is not None:
            (folder / PROBE_FILE).write_bytes(encode_probe(probe))
            files[PROBE_FILE] = file_entry(folder / PROBE_FILE)
        tensors = {"w": TensorEntry(shape, "F32", file.name)}
        write_manifest(folder, Manifest("actor", version, files, tensors))
        return folder

    def publish(self, version: int, folder: Path | None = None) -> None:
        value = names.PublishedVersion(version, str(folder or self.weights(version))).encode()
        self.resolver.add(names.model_version_key("actor"), value, replace=True)

    def servers(self) -> dict[int, ServerStatus]:
        return {server.index: server for server in self.manager.status().servers}

    def counts(self) -> RolloutCounts:
        return self.manager._service.gate.counts()

    async def until(self, condition: Callable[[dict[int, ServerStatus]], bool]) -> None:
        """Wait until `condition` holds of the servers' states."""
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.servers()):
                await self.manager._fleets.own.changed.wait(0.2)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        self.manager.stop.set()
        await self.task
        self.resolver.close()


def config_of(**manager: Any) -> ExperimentConfig:
    config = ExperimentConfig(train_batch_size=2, max_head_offpolicyness=1)
    config.system.encrypt = False
    config.model.dtype = config.generation.dtype = Dtype.float32  # as the launcher settles `auto` on a CPU
    config.manager.health_interval_s = 0.1
    config.manager.update_timeout_s = config.system.lease_s = LIMIT_S
    for name, value in manager.items():
        setattr(config.manager, name, value)
    return config


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path, config_of())
    await run.client()
    yield run
    await run.close()


def serving(version: int, *indices: int) -> Callable[[dict[int, ServerStatus]], bool]:
    return lambda servers: all(
        index in servers and (servers[index].state, servers[index].version) == ("serving", version) for index in indices
    )


def request_of(name: str, tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), 2, SamplingParams(max_new_tokens=tokens, seed=3))


async def test_a_registered_server_serves_and_is_brought_to_each_published_version(
    run: Run, start_fake_server: Any
) -> None:
    server = await start_fake_server()
    run.register(0, server)
    await run.until(serving(0, 0))
    run.publish(1)
    await run.until(serving(1, 0))
    assert server.version == "1"
    steps = [name for name in server.calls if name not in ("ready", "model_info")]
    assert steps == ["pause_generation", "update_weights_from_disk", "continue_generation"]
    assert run.manager._service.gate.version == 1
    run.publish(4)
    await run.until(serving(4, 0))
    session = await run.manager._service.begin_run(RunBegin())
    reply = await run.manager._service.consumed(ConsumedReport(1, manager=session.manager))
    assert reply.versions_in_use == [4]


async def test_name_resolution_that_is_away_ends_neither_the_manager_nor_what_it_follows(
    run: Run, start_fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = itertools.count()  # of several threads

    def stale_at_first(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(run.dir / "name_resolve") in str(path) and next(failures) < 8:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return call(path, *args, **kwargs)

        return wrapped

    for owner, name in ((os, "listdir"), (Path, "open")):
        monkeypatch.setattr(owner, name, stale_at_first(getattr(owner, name)))
    server = await start_fake_server()
    await asyncio.to_thread(run.register, 0, server)
    await run.until(serving(0, 0))
    await asyncio.to_thread(run.publish, 1)
    await run.until(serving(1, 0))
    assert next(failures) > 8
    assert not run.task.done()


async def test_one_killed_one_hanging_and_one_refusing_server_lose_nothing(
    tmp_path: Path, start_fake_server: Any
) -> None:
    """The three share 12 rollouts and fail in the middle of an update; a fourth server completes everything."""
    run = Run(tmp_path, config_of(update_timeout_s=1.0))
    client = await run.client()
    killed, hanging, refusing, sound = [await start_fake_server() for _ in range(4)]
    for index, server in enumerate((killed, hanging, refusing)):
        server.hold_after = 1
        run.register(index, server)
    await run.until(serving(0, 0, 1, 2))
    run.begin()
    run.manager._service.gate.batch_size = 6
    granted = await client.allocate([f"r{i}" for i in range(12)], timeout_s=LIMIT_S)
    assert len(granted.granted) == 12
    settings: dict[str, Any] = {"security": None, "max_concurrent": 12, "request_timeout_s": 600.0}
    async with RolloutClient(client, **settings) as rollouts:
        calls = [asyncio.create_task(rollouts.generate(request_of(f"q{i}"), f"r{i}")) for i in range(12)]
        for server in (killed, hanging, refusing):
            await server.until(lambda server=server: server.generated_tokens >= 8)
        await killed.kill()
        hanging.update = "hang"
        refusing.update = "refuse"
        run.register(3, sound)
        run.publish(1)
        await run.until(serving(1, 3))
        results = await asyncio.gather(*calls)
        await run.until(lambda servers: serving(1, 3)(servers) and all(servers[i].failures > 0 for i in range(3)))
        states = {index: server.state for index, server in run.servers().items()}
        assert "serving" not in (states[0], states[1], states[2])
    reference = results[0].completions
    for result in results:
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in reference]
        assert all(len(c.token_ids) == 6 and c.versions == sorted(c.versions) for c in result.completions)
    client.finish([FinishedRollout(f"r{i}", True) for i in range(12)])
    await client.flush()
    arrived = ReceivedReport([ReceivedRollout(f"r{i}", "a prompt", i, 0, 12) for i in range(12)])
    assert (await client.call(arrived)).refused == []
    counts = run.counts()
    assert (counts.submitted, counts.finished_untrained, counts.running) == (12, 12, 0)
    assert run.manager._service.router.placed == 0
    refusing.update = "ok"
    await run.until(serving(1, 2))
    await run.close()


async def test_a_server_that_loads_slowly_keeps_its_place_while_its_process_works(
    tmp_path: Path, start_fake_server: Any
) -> None:
    run = Run(tmp_path, config_of(update_timeout_s=1.0))
    await run.client()
    slow, silent = await start_fake_server(), await start_fake_server()
    for index, server in enumerate((slow, silent)):
        server.update = "hang"
        run.register(index, server)
    await run.until(serving(0, 0, 1))
    run.publish(1)

    def work(progress: int) -> None:
        status = names.WorkerStatus("ready", 1, progress=progress).encode()
        run.resolver.add(names.status_key("generation_server", 0), status, lease_s=LIMIT_S, replace=True)

    progress = itertools.count()
    async with asyncio.timeout(LIMIT_S):
        while run.servers()[1].failures < 2:
            await asyncio.to_thread(work, next(progress))
            await asyncio.sleep(0.1)
    assert (run.servers()[0].state, run.servers()[0].failures) == ("updating", 0)
    silence = "no sign of life for 1 s (manager.update_timeout_s) in its update to v1"
    assert silence in run.servers()[1].reason
    (reported,) = [json.loads(line)["remark"] for line in (tmp_path / "remarks.jsonl").read_text().splitlines()]
    assert reported.startswith(f"WARNING: generation_server/1 is left out and updated again: {silence}"), "told once"
    await run.until(lambda servers: servers[0].failures > 0)  # it is silent now
    await run.close()


async def test_a_restarted_server_gets_the_newest_weights_before_requests(run: Run, start_fake_server: Any) -> None:
    first, second = await start_fake_server(), await start_fake_server()
    run.register(0, first)
    run.publish(1)
    await run.until(serving(1, 0))
    await first.kill()
    run.register(0, second)
    await run.until(lambda servers: servers[0].url == second.url and serving(1, 0)(servers))
    assert second.calls.index("update_weights_from_disk") < second.calls.index("continue_generation")
    assert "generate" not in second.calls


async def test_a_server_that_wakes_after_its_successor_came_is_asked_for_nothing_and_nobody_takes_its_answers(
    run: Run, start_fake_server: Any
) -> None:
    """Its process, which ends itself within a third of a heartbeat, is left out here."""
    old, successor = await start_fake_server(), await start_fake_server()
    old.hold_after = 1
    run.register(0, old)
    await run.until(serving(0, 0))
    run.begin()
    client = run.clients[0]
    await client.allocate(["r0", "r1"], timeout_s=LIMIT_S)
    async with RolloutClient(client, security=None, max_concurrent=2, request_timeout_s=600.0) as rollouts:
        call = asyncio.create_task(rollouts.generate(request_of("q0"), "r0"))
        await old.until(lambda: old.generated_tokens == 2)  # and is stopped in the middle of both answers
        old.hang = True
        run.register(0, successor)
        answered = (await call).completions
        assert [len(request["rid"]) for request in successor.requests] == [2]
        run.publish(1)
        await run.until(serving(1, 0))
        before = len(old.calls)
        old.hang = False
        await old.release()  # it wakes
        await old.until(lambda: not old.running)
        later = (await rollouts.generate(request_of("q1"), "r1")).completions
    client.finish([FinishedRollout(f"r{i}", True) for i in range(2)])
    await client.flush()
    assert [completion.versions for completion in [*answered, *later]] == [[0] * 6] * 2 + [[1] * 6] * 2
    assert len(successor.requests) == 2
    assert (old.version, old.calls[before:], run.servers()[0].url) == ("0", [], successor.url)
    assert run.manager._service.router.placed == 0


@pytest.mark.parametrize("published", [True, False])
async def test_a_server_that_was_started_again_at_its_address_is_brought_back(
    published: bool, run: Run, start_fake_server: Any
) -> None:
    """An adopted server's registration does not change when somebody else restarts it between two health checks."""
    server = await start_fake_server()
    run.register(0, server)
    if published:
        run.publish(1)
    await run.until(serving(int(published), 0))
    server.version = "0" if published else "7"
    await run.until(lambda servers: "was it started again" in servers[0].reason)
    if not published:
        run.publish(1)
    await run.until(serving(1, 0))
    assert server.version == "1"


async def test_a_server_whose_registration_lapses_is_forgotten(run: Run, start_fake_server: Any) -> None:
    server = await start_fake_server()
    run.register(0, server)
    await run.until(serving(0, 0))
    run.resolver.delete(names.gen_server_key(0))
    await run.until(lambda servers: not servers)
    assert run.manager._service.router.servers == []


async def test_torn_and_mismatching_weights_are_refused_and_the_old_ones_keep_serving(
    run: Run, start_fake_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_fake_server()
    run.register(0, server)
    run.publish(1)
    await run.until(serving(1, 0))
    torn, mismatching, mislabelled = run.weights(2), run.weights(3, shape=(3,)), run.weights(5)
    (torn / "model.safetensors").write_bytes(b"half")
    with caplog.at_level(logging.ERROR):
        for version, folder in ((2, torn), (3, mismatching), (6, mislabelled)):
            run.publish(version, folder)
            await run.until(lambda _: f"weights v{version} are refused" in caplog.text)  # noqa: B023 - called at once
            assert serving(1, 0)(run.servers())
        run.publish(7)
        await run.until(serving(7, 0))
    updates = [name for name in server.calls if name == "update_weights_from_disk"]
    assert len(updates) == 2


async def test_a_resumed_run_begins_at_the_version_of_its_checkpoint(run: Run, start_fake_server: Any) -> None:
    server = await start_fake_server()
    run.register(0, server)
    await run.until(serving(0, 0))
    client = run.clients[0]
    early = asyncio.create_task(client.allocate([str(i) for i in range(9)], timeout_s=LIMIT_S))
    run.publish(9)
    run.begin(version=9, dropped={"failed": 3})
    reply = await early
    assert [grant.version for grant in reply.granted] == [9] * 4
    counts = run.counts()
    assert (counts.submitted, counts.trained, counts.dropped) == (18 + 3 + 4, 18, {"failed": 3})


async def test_a_worker_whose_status_is_gone_loses_its_rollouts_at_once(run: Run, start_fake_server: Any) -> None:
    run.register(0, await start_fake_server())
    await run.until(serving(0, 0))
    run.resolver.add(names.status_key("rollout_worker", 0), names.WorkerStatus("ready", 7).encode())
    run.begin()
    client = run.clients[0]
    await client.allocate(["a"], timeout_s=LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while not run.manager._workers.present:
            await run.manager._service.progress.wait(0.05)
        run.resolver.delete(names.status_key("rollout_worker", 0))
        while run.counts().running:
            await run.manager._service.progress.wait(0.05)
    assert run.counts().dropped == {"worker_died": 1}


async def test_what_was_in_hand_at_a_death_is_suspect_though_the_name_runs_out_before_the_successor_is_there(
    run: Run, start_fake_server: Any
) -> None:
    run.register(0, await start_fake_server())
    await run.until(serving(0, 0))
    run.resolver.add(names.status_key("rollout_worker", 0), names.WorkerStatus("ready", 7).encode())
    run.begin()
    await run.clients[0].allocate(["a"], timeout_s=LIMIT_S)
    rollouts, progress = run.manager._service.rollouts, run.manager._service.progress
    async with asyncio.timeout(LIMIT_S):
        while not run.manager._workers.present:
            await progress.wait(0.05)
        run.resolver.add(names.incarnation_key("rollout_worker", 0), "1")  # the launcher's word
        while run.counts().running:
            await progress.wait(0.05)
        run.resolver.delete(names.status_key("rollout_worker", 0))
        while run.manager._workers.present:
            await progress.wait(0.05)
    run.resolver.add(names.status_key("rollout_worker", 0), names.WorkerStatus("starting", 8, "", 1).encode())
    async with asyncio.timeout(LIMIT_S):
        while not run.manager._workers.present:
            await progress.wait(0.05)
    assert run.manager._service.workers.of("rollout_worker/0").incarnation == 1
    assert rollouts.suspects._against == {rollouts.prompt_id(0): 2}
    assert run.counts().dropped == {"worker_died": 1}


async def test_finish_lets_running_requests_end_before_the_update(tmp_path: Path, start_fake_server: Any) -> None:
    run = Run(tmp_path, config_of(update_mode="finish"))
    client = await run.client()
    server = await start_fake_server()
    server.hold_after = 2
    run.register(0, server)
    await run.until(serving(0, 0))
    async with RolloutClient(client, security=None, max_concurrent=4, request_timeout_s=600.0) as rollouts:
        call = asyncio.create_task(rollouts.generate(request_of("q")))
        await server.until(lambda: server.generated_tokens == 4)
        run.publish(1)
        await run.until(lambda servers: servers[0].state == "draining")
        assert not {"pause_generation", "update_weights_from_disk"} & set(server.calls)
        await server.release()
        result = await call
        await run.until(serving(1, 0))
    assert [completion.versions for completion in result.completions] == [[0] * 6] * 2
    steps = [call for call in server.calls if call.endswith("_generation") or call.startswith("update_weights")]
    assert steps == ["pause_generation", "update_weights_from_disk", "continue_generation"]
    await run.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_running_requests_are_kept_on_their_server_across_an_update(
    mode: str, tmp_path: Path, start_fake_server: Any
) -> None:
    run = Run(tmp_path, config_of(update_mode=mode))
    client = await run.client()
    server = await start_fake_server()
    server.hold_after = 2
    run.register(0, server)
    await run.until(serving(0, 0))
    async with RolloutClient(client, security=None, max_concurrent=4, request_timeout_s=600.0) as rollouts:
        call = asyncio.create_task(rollouts.generate(request_of("q")))
        await server.until(lambda: server.generated_tokens == 4)
        run.publish(1)
        await run.until(serving(1, 0))
        await server.release()
        result = await call
    assert len(server.requests) == 1
    assert [completion.versions for completion in result.completions] == [[0, 0, 1, 1, 1, 1]] * 2
    assert server.flushed == [mode == "retract"]
    await run.close()


async def test_a_probe_that_differs_later_takes_a_server_out_though_its_requests_were_kept(
    tmp_path: Path, start_fake_server: Any
) -> None:
    run = Run(tmp_path, config_of(update_mode="retract"))
    await run.client()
    server = await start_fake_server()
    server.logprobs = {str(version): logprobs_of(version) for version in (1, 2)}
    run.register(0, server)
    run.publish(1, run.weights(1, probe=probe_of(1)))
    await run.until(serving(1, 0))
    server.stale = "1"
    run.publish(2, run.weights(2, probe=probe_of(2)))
    await run.until(lambda servers: servers[0].failures > 1)  # the first time by the late check, then at once
    await server.until(lambda: server.paused)
    server.stale = None
    await run.until(serving(2, 0))
    assert not server.paused
    await run.close()


@pytest.mark.parametrize("mode", ["interrupt", "retract", "in_place"])
async def test_real_engines_answer_the_same_through_any_number_of_updates(tmp_path: Path, mode: str) -> None:
    """Two embedded engines, five versions of equal weights published meanwhile: the same tokens, of mixed versions."""
    run = Run(tmp_path, config_of(update_mode=mode))
    await run.client()
    model = tiny_model()
    engines = [GenerationEngine(tiny_model(), max_running_requests=32, weight_version="0") for _ in range(2)]
    servers = []
    for index, engine in enumerate(engines):
        engine.eos_token_ids = ()
        engine.start()
        servers.append(await serve(engine))
        run.register(index, servers[-1])
    await run.until(serving(0, 0, 1))
    request = GenerationRequest("q", (1, 2, 3), 4, SamplingParams(max_new_tokens=300, seed=3))
    schedule, routes = run.clients[0].schedule, []

    async def noted(request: RouteRequest, timeout_s: float) -> Route | None:
        if (route := await schedule(request, timeout_s)) is not None:
            routes.append(route)
        return route

    run.clients[0].schedule = noted  # type: ignore[method-assign]
    async with RolloutClient(run.clients[0], security=None, max_concurrent=16, request_timeout_s=600.0) as rollouts:
        expected = await rollouts.generate(request)
        for engine in engines:
            let_make_40_steps_a_version(engine, last=5)
        calls = [asyncio.create_task(rollouts.generate(request)) for _ in range(8)]
        for version in range(1, 6):
            await until_generated(engines, generated_by(engines) + 200)
            shared, source = SharedFiles(model.config), WholeModel(model)
            published = publish(
                source, run.dir / "weights", role="actor", version=version, ranks=Ranks(), shared=shared
            )
            run.publish(version, published)
            await run.until(serving(version, 0, 1))
        results = await asyncio.gather(*calls)
    rounds = len(routes)
    assert rounds > 9 if mode == "interrupt" else rounds == 9
    for result in results:
        for completion, reference in zip(result.completions, expected.completions, strict=True):
            assert completion.token_ids == reference.token_ids
            assert completion.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
            assert completion.versions == sorted(completion.versions)
    assert len({version for result in results for c in result.completions for version in c.versions}) > 1
    for server, engine in zip(servers, engines, strict=True):
        await server.close()
        engine.close()
    await run.close()


CANARY_IDS = tuple(range(6))


def probe_of(version: int) -> LogprobProbe:
    return LogprobProbe.of([CANARY_IDS], [logprobs_of(version)])


def logprobs_of(version: int) -> list[float]:
    return [0.0, *(-1.0 - 0.01 * version - 0.1 * place for place in range(5))]


async def test_a_server_with_stale_weights_is_quarantined_until_it_scores_as_the_trainer_does(
    run: Run, start_fake_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the new version all the time; the other server goes on."""
    stale, sound = await start_fake_server(), await start_fake_server()
    for index, server in enumerate((stale, sound)):
        server.logprobs = {str(version): logprobs_of(version) for version in (1, 2)}
        run.register(index, server)
    run.publish(1, run.weights(1, probe=probe_of(1)))
    await run.until(serving(1, 0, 1))
    check = run.manager._fleets.logprob_check
    assert check is not None
    assert check.differences == {0: 0.0, 1: 0.0}
    stale.stale = "1"
    with caplog.at_level(logging.ERROR):
        run.publish(2, run.weights(2, probe=probe_of(2)))
        await run.until(serving(2, 1))
        await run.until(lambda servers: servers[0].failures > 1 and servers[0].state == "quarantined")
    assert stale.paused
    assert serving(2, 1)(run.servers())
    assert check.alarms == run.servers()[0].failures
    assert check.differences == {0: pytest.approx(0.01), 1: 0.0}
    assert "log-probability -1.31, the trainer -1.32; the difference 0.01 is above" in caplog.text
    metrics = generate_latest(manager_registry(run.manager._service, run.manager._fleets.own.decisions, check)).decode()
    assert 'asyncrl_logprob_check_difference{server="1"} 0.0' in metrics
    assert f"asyncrl_logprob_check_alarms_total {check.alarms:.1f}" in metrics
    stale.stale = None
    await run.until(serving(2, 0))
    assert check.differences[0] == 0.0


@pytest.mark.parametrize("mode", [UpdateMode.interrupt, UpdateMode.retract])
async def test_servers_that_never_score_as_the_trainer_does_end_the_run(
    tmp_path: Path, start_fake_server: Any, monkeypatch: pytest.MonkeyPatch, mode: UpdateMode
) -> None:
    monkeypatch.setattr("asyncrl.manager.fleet.decisions.BACKOFF", Backoff(0.01, 0.01))
    run = Run(tmp_path, config_of(update_mode=mode))
    await run.client()
    server = await start_fake_server()
    server.logprobs = {"1": logprobs_of(2)}
    run.register(0, server)
    run.publish(1, run.weights(1, probe=probe_of(1)))
    async with asyncio.timeout(LIMIT_S):
        with pytest.RaisesGroup(
            pytest.RaisesExc(CannotContinue, match="server 0 does not .*after 5 updates in a row"),
            flatten_subgroups=True,
        ):
            await run.task
    assert server.paused, "nothing of it is handed out"
    assert run.manager._fleets.logprob_check is not None
    assert run.manager._fleets.logprob_check.alarms == DISAGREEMENTS_ALLOWED
    for client in run.clients:
        await client.close()
    run.resolver.close()


async def test_a_server_that_does_not_answer_the_probe_is_quarantined(run: Run, start_fake_server: Any) -> None:
    server = await start_fake_server()
    server.logprobs = {"1": [0.0] * (len(CANARY_IDS) + 1)}  # for other tokens than were asked: it fails on them
    run.register(0, server)
    run.publish(1, run.weights(1, probe=probe_of(1)))
    await run.until(lambda servers: 0 in servers and servers[0].failures > 0)
    check = run.manager._fleets.logprob_check
    assert check is not None
    assert check.alarms == 0
    server.logprobs = {"1": logprobs_of(1)}
    await run.until(serving(1, 0))


async def test_no_probe_is_asked_for_where_the_tolerance_is_0(tmp_path: Path, start_fake_server: Any) -> None:
    run = Run(tmp_path, config_of(logprob_check_tolerance=0.0))
    await run.client()
    server = await start_fake_server()
    run.register(0, server)
    run.publish(1, run.weights(1, probe=probe_of(1)))
    await run.until(serving(1, 0))
    assert "generate" not in server.calls
    await run.close()


async def test_a_version_whose_bytes_are_damaged_is_refused_by_the_engine_that_reads_it_which_goes_on_with_its_own(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    engine = GenerationEngine(tiny_model(), max_running_requests=8, weight_version="0")
    engine.start()
    server = await serve(engine)
    run.register(0, server)
    await run.until(serving(0, 0))
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}

    def publish_changed(version: int) -> Path:
        for parameter in model.parameters():
            parameter.data += 0.3
        shared, source = SharedFiles(model.config), WholeModel(model)
        return publish(source, run.dir / "weights", role="actor", version=version, ranks=Ranks(), shared=shared)

    damaged = publish_changed(1)
    weights = damaged / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        run.publish(1, damaged)
        await run.until(lambda servers: "damaged" in servers[0].reason)
        assert serving(0, 0)(run.servers())
        assert engine.weight_version == "0"
        assert not engine.paused
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
        run.publish(2, publish_changed(2))
        await run.until(serving(2, 0))
    assert "v1 is damaged; generation server 0 keeps v0" in caplog.text
    await server.close()
    engine.close()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.1)])
async def test_a_real_engine_scores_every_version_as_the_trainer_does(run: Run, dtype: str, bound: float) -> None:
    """Ten versions that differ by more than five times the bound, which is far below the default tolerance."""
    model = tiny_model().to(torch.float32 if dtype == "float32" else torch.bfloat16)
    served = tiny_model().to(model.dtype)
    engine = GenerationEngine(served, max_running_requests=8, weight_version="0")
    engine.eos_token_ids = ()
    engine.start()
    server = await serve(engine)
    run.register(0, server)
    trainer = FlatPolicyEngine(model, temperature=0.7, attention=AttentionKind.packed, tokens_per_micro_batch=64)
    tokens = probe_tokens(40, context=400)
    check = run.manager._fleets.logprob_check
    assert check is not None
    check.tolerance = bound
    torch.manual_seed(1)
    before: list[float] = []
    for version in range(1, 11):
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        probe = LogprobProbe.of(tokens, trainer.score_sequences(tokens))
        logprobs = [value for each in probe.sequences for value in each.logprobs]
        if before:
            assert max(abs(a - b) for a, b in zip(logprobs, before, strict=True)) > 5 * bound
        before = logprobs
        folder = run.dir / "weights"
        shared, source = SharedFiles(model.config), WholeModel(model)
        published = publish(source, folder, role="actor", version=version, ranks=Ranks(), shared=shared, probe=probe)
        run.publish(version, published)
        await run.until(serving(version, 0))
        assert check.differences[0] <= bound
    assert check.alarms == 0
    await server.close()
    engine.close()


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=400,
            tie_word_embeddings=True,
        )
    ).eval()


def let_make_40_steps_a_version(engine: GenerationEngine, last: int) -> None:
    """Then it waits to be told something, as by an update; with version `last` it goes on to the end.

    So nothing ends before it is updated, however long that takes.
    """
    step, made, mailbox = engine.step, Counter[str](), engine._mailbox

    def paced() -> bool:
        version = engine.weight_version
        made[version] += 1
        if made[version] > 40 and int(version) < last:
            mailbox.wait()
        return step()

    engine.step = paced  # type: ignore[method-assign]


def generated_by(engines: list[GenerationEngine]) -> int:
    return sum(engine._batch.counts.generated for engine in engines)


async def until_generated(engines: list[GenerationEngine], tokens: int) -> None:
    """Wait until the engines have generated `tokens` in all."""
    async with asyncio.timeout(LIMIT_S):
        while generated_by(engines) < tokens:  # noqa: ASYNC110 - they are other threads
            await asyncio.sleep(0.001)


async def test_what_is_used_is_not_handed_out(tmp_path: Path, start_fake_server: Any) -> None:
    order, run = DataOrder(ROWS, 1), Run(tmp_path, config_of())
    try:
        client = await run.client()
        run.register(0, await start_fake_server())
        run.begin(used=[order.ref(number).prompt_id for number in (0, 2, 3)])
        granted = (await client.allocate(["a", "b"], timeout_s=LIMIT_S)).granted
        assert [grant.order for grant in granted] == [1, 4]
    finally:
        await run.close()


async def test_a_manager_that_follows_one_that_died_lets_rows_rest_as_that_one_did(tmp_path: Path) -> None:
    config = config_of()
    config.dataset.curriculum.high = 0.8
    run = Run(tmp_path, config)
    try:
        await run.client()
        run.begin(curriculum=[[3, 0, 1.0]])
        await run.until(lambda _: run.manager._service.begun)
        measured = run.manager._service.rollouts.curriculum
        assert measured is not None
        assert measured.state() == [(3, 0, 1.0)]
    finally:
        await run.close()


async def test_the_gate_stays_shut_until_each_worker_that_is_ready_has_said_what_it_holds(
    tmp_path: Path, start_fake_server: Any
) -> None:
    run = Run(tmp_path, config_of())
    try:
        for index, state in enumerate(("ready", "ready", "starting")):
            status = names.WorkerStatus(state, 7, incarnation=int(index == 1))
            run.resolver.add(names.status_key("rollout_worker", index), status.encode())
        run.resolver.add(names.incarnation_key("rollout_worker", 1), "2")  # it has died; its entry is not over yet
        run.register(0, await start_fake_server())
        run.begin()
        other = await run.client("rollout_worker/3")
        asking = asyncio.create_task(other.allocate(["b"], timeout_s=LIMIT_S))
        await run.until(lambda _: run.manager._service.pending_reports.awaited == {"rollout_worker/0": 0})
        assert not run.manager._service.begun
        assert not asking.done()
        worker = await run.client("rollout_worker/0")
        worker._held.granted([GrantedRollout("a", DataOrder(ROWS, 1).ref(0).prompt_id, 0, 0, 0, 0, 0)])
        await worker.lost_servers(-1, 0.0)
        granted = (await asking).granted
        assert [grant.order for grant in granted] == [1], "the first prompt is played by the one that spoke last"
        assert run.counts().running == 2
    finally:
        await run.close()


async def test_the_ledger_has_what_happened_soon_after_without_a_step(run: Run, start_fake_server: Any) -> None:
    """The dashboard shows it, and a kill loses a fraction of a second."""
    run.register(0, await start_fake_server())
    run.begin()
    await run.clients[0].allocate(["a", "b"], timeout_s=LIMIT_S)
    file = run.dir / LEDGER_DIR / "000001.jsonl"
    async with asyncio.timeout(LIMIT_S):
        while (lines := file.read_bytes().splitlines())[1:] == []:  # noqa: ASYNC110 - a file is no event
            await asyncio.sleep(0.01)
    assert [json.loads(line)["kind"] for line in lines] == ["begin", "admitted", "admitted"]


async def test_a_worker_that_does_not_speak_is_waited_for_as_long_as_its_lease(
    tmp_path: Path, start_fake_server: Any
) -> None:
    config = config_of()
    config.system.lease_s = 0.34
    run = Run(tmp_path, config)
    try:
        run.resolver.add(names.status_key("rollout_worker", 0), names.WorkerStatus("ready", 7).encode())
        run.register(0, await start_fake_server())
        run.begin()
        other = await run.client("rollout_worker/1")
        granted = (await other.allocate(["b"], timeout_s=LIMIT_S)).granted
        assert [grant.order for grant in granted] == [0], "what it may hold does not count"
        assert run.counts().submitted == 1
    finally:
        await run.close()
