"""EncoderServers and their client, over real HTTP in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.api import Episode
from asyncrl.api.picture import Picture
from asyncrl.comm.http_client import HttpRefused, JsonHttp
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.inference.encoder.client import EncoderClient, EncoderUnavailable
from asyncrl.inference.encoder.process import EncoderService, loaded
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.plugins.rewards.srpo import SRPOReward
from asyncrl.rollout.checks import problems_of_others
from asyncrl.rollout.settings import EncoderConfig
from asyncrl.rollout.user_code.rewards_of_groups import with_embeddings
from asyncrl.rollout.user_code_pool.call_records import UserCodeError

LIMIT_S = 300.0


def grey(level: int) -> Picture:
    return Picture.from_array(np.full((4, 4, 3), level, np.uint8))


@dataclass
class Levels:
    """An encoder: the first and the last frame's grey level of each clip."""

    free: Event = field(default_factory=Event)
    calls: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free.set()

    def __call__(self, clips: Sequence[Sequence[Picture]]) -> Any:
        assert self.free.wait(LIMIT_S)
        self.calls.append(len(clips))
        if len(clips[0]) == 3:
            raise RuntimeError("three are too many")
        return [[float(clip[0].pixels()[0, 0, 0]), float(clip[-1].pixels()[0, 0, 0])] for clip in clips]


@pytest.fixture
def security(tmp_path: Path) -> HttpSecurity:
    return RunSecret.create(tmp_path / "secret").http()


@asynccontextmanager
async def server(encode: Levels, security: HttpSecurity, **how: Any) -> AsyncIterator[tuple[EncoderService, str]]:
    settings = {"label": "levels", "batch": 8, "cached": 100, **how}
    service = EncoderService(encode, security=security, **settings)
    try:
        yield service, await service.http.start("127.0.0.1")
    finally:
        encode.free.set()
        await service.close()


@asynccontextmanager
async def client(
    urls: dict[str, str], security: HttpSecurity, limit_s: float = LIMIT_S, looked: asyncio.Event | None = None
) -> AsyncIterator[EncoderClient]:
    def servers() -> dict[str, str]:
        if looked is not None:
            looked.set()
        return urls

    http = JsonHttp(security)
    try:
        yield EncoderClient(http, servers, limit_s)
    finally:
        await http.close()


async def test_clips_are_embedded_once_whoever_asks_and_their_frames_are_sent_once(security: HttpSecurity) -> None:
    encode, clips = Levels(), [[grey(1), grey(2)], [grey(3), grey(2)], [grey(1), grey(2)]]
    async with server(encode, security) as (service, url), client({"s/0": url}, security) as one:
        async with client({"s/0": url}, security) as other:
            assert [list(v) for v in await one.embed(clips)] == [[1.0, 2.0], [3.0, 2.0], [1.0, 2.0]]
            assert [list(v) for v in await other.embed(clips[::-1])] == [[1.0, 2.0], [3.0, 2.0], [1.0, 2.0]]
        assert (service.encoded, service.cache.hits, encode.calls) == (2, 2, [2])


async def test_clips_that_arrive_while_it_computes_are_embedded_together(security: HttpSecurity) -> None:
    encode = Levels()
    encode.free.clear()
    async with server(encode, security, batch=3) as (service, url), client({"s/0": url}, security) as asked:
        tasks = [asyncio.create_task(asked.embed([[grey(n)], [grey(n // 2)]])) for n in range(5)]
        async with asyncio.timeout(LIMIT_S):
            while service.waiting < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        tasks[4].cancel()  # others wait for one of its clips
        encode.free.set()
        found = [await task for task in tasks[:4]]
    assert [[v[0] for v in pair] for pair in found] == [[float(n), float(n // 2)] for n in range(4)]
    assert max(encode.calls) == 3, "some of five callers' clips were embedded together"
    assert sum(encode.calls) <= 5, "each clip once"


async def test_the_least_recently_used_embedding_is_dropped(security: HttpSecurity) -> None:
    encode = Levels()
    async with server(encode, security, cached=2) as (service, url), client({"s/0": url}, security) as asked:
        for level in (1, 2, 1, 3, 1, 2):
            await asked.embed([[grey(level)]])
        assert (service.encoded, service.cache.hits) == (4, 2)


async def test_while_a_server_is_away_another_takes_its_clips_and_without_any_the_call_waits(
    security: HttpSecurity,
) -> None:
    clips, urls = [[grey(level)] for level in range(16)], dict[str, str]()
    looked = asyncio.Event()
    async with client(urls, security, looked=looked) as asked, server(Levels(), security) as (first, url):
        asking = asyncio.create_task(asked.embed(clips))
        await looked.wait()
        async with server(Levels(), security) as (second, other):
            urls |= {"s/0": url, "s/1": other}
            assert [v[0] for v in await asking] == list(range(16))
            assert first.encoded + second.encoded == 16
            assert first.encoded
            assert second.encoded
        del urls["s/1"]  # as when its lease has run out
        assert [v[0] for v in await asked.embed(clips)] == list(range(16))
        assert first.encoded == 16


async def test_what_fails_is_said_and_the_server_goes_on(security: HttpSecurity) -> None:
    async with server(Levels(), security) as (service, url), client({"s/0": url}, security) as asked:
        with pytest.raises(EncoderUnavailable, match="levels raised RuntimeError: three are too many"):
            await asked.embed([[grey(1)] * 3])
        assert [list(v) for v in await asked.embed([[grey(1)]])] == [[1.0, 1.0]]
        assert service.waiting == 0
    async with client({}, security, 0.05) as alone:
        with pytest.raises(EncoderUnavailable, match="no EncoderServer is registered"):
            await alone.embed([[grey(1)]])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"clips": [[]]}, "1 to 1024 frames"),
        ({"clips": [["a"]] * 1025}, "at most 1024 clips"),
        ({"clips": [["a"]], "pictures": {"a": b"GIF89a"}}, "give PNG or JPEG"),
        ({"clips": [["a"]], "pictures": {"a": grey(1).data}}, "does not have the content of its hash"),
        ({"clips": [["a"]], "more": 1}, "unknown field"),
    ],
)
async def test_a_wrong_request_is_refused(security: HttpSecurity, body: dict[str, Any], message: str) -> None:
    http = JsonHttp(security)
    async with server(Levels(), security) as (_, url):
        with pytest.raises(HttpRefused, match=message) as caught:
            await http.call("POST", f"{url}/embed", msgspec.to_builtins(body), timeout_s=LIMIT_S)
        assert caught.value.status == 400
        stranger = JsonHttp(replace(security, token="wrong"))
        with pytest.raises(HttpRefused, match="bearer token"):
            await stranger.call("POST", f"{url}/embed", {"clips": []}, timeout_s=LIMIT_S)
        await stranger.close()
    await http.close()


def sample(number: int, success: float, level: int | None) -> Episode:
    frames = () if level is None else (grey(255), grey(level))
    return Episode({"task": "t"}, "", ("go",), "go", 1, False, success, number, 3, {"success": success}, frames)


async def test_srpo_takes_embeddings_of_servers_as_it_takes_its_own() -> None:
    group = [sample(0, 0.0, None), sample(0, 0.0, 9), sample(1, 1.0, 200), sample(2, 0.0, 90)]

    async def embed(episodes: Sequence[Sequence[Picture]]) -> list[tuple[float, ...]]:
        return [tuple(vector) for vector in Levels()(episodes)]

    embedded = await with_embeddings(group, embed)
    assert [each.embedding for each in embedded] == [(255.0, 9.0), (255.0, 9.0), (255.0, 200.0), (255.0, 90.0)]
    own = SRPOReward(encoder=f"{__file__}:levels", frames=2)
    assert SRPOReward(encoder="server")(embedded) == own(group)
    with pytest.raises(ValueError, match=r"rollout\.encoder\.servers"):
        SRPOReward(encoder="server")(group)
    with pytest.raises(ValueError, match=r"settings of rollout\.encoder"):
        SRPOReward(encoder="server", frames=8)


def levels(clips: Sequence[Sequence[Picture]]) -> Any:
    return Levels()(clips)


def test_an_encoder_is_named_as_other_plug_ins_are() -> None:
    assert loaded(EncoderConfig(path=f"{__file__}:levels"))([[grey(7)]]) == [[7.0, 7.0]]
    for settings, message in (
        (EncoderConfig(path=f"{__file__}:nothing"), "rollout.encoder.path"),
        (EncoderConfig(path=f"{__file__}:levels", args={"a": 1}), "is a function"),
        (EncoderConfig(path=f"{__file__}:Levels", args={"a": 1}), "unexpected keyword"),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded(settings)


def problem(*overrides: str) -> str:
    try:
        validate(load_experiment("embodied_srpo", [*overrides]))
    except ConfigError as error:
        return str(error)
    return ""


def test_servers_that_cannot_be_are_refused_before_the_start() -> None:
    from_servers = "rewards=[{name: srpo, path: 'asyncrl.plugins.rewards.srpo:SRPOReward', args: {encoder: server}}]"
    servers = ["rollout.encoder.servers=1", "rollout.encoder.args={folder: /models/vjepa2}"]
    assert problem(from_servers, *servers) == ""
    assert "rollout.encoder.servers=0: rewards[0].args" in problem(from_servers)
    without_folder = load_experiment("embodied_srpo", [from_servers, servers[0]])
    assert isinstance(without_folder, ExperimentConfig)
    (reported,) = problems_of_others(without_folder)
    assert reported.startswith("rollout.encoder.args=")
    assert "needs args.folder" in reported
    on_gpu = "rollout.encoder.args={folder: /m, device: cuda}"
    assert "rollout.encoder.gpus is 0" in problem(servers[0], on_gpu)
    assert problem(servers[0], on_gpu, "rollout.encoder.gpus=1") == ""
    assert "add device: cuda" in problem(*servers, "rollout.encoder.gpus=1")


async def test_an_encoder_that_fails_fails_the_group_by_name() -> None:
    async def embed(episodes: Sequence[Sequence[Picture]]) -> list[tuple[float, ...]]:
        raise UserCodeError("encoder e", "gave no embeddings: it is away")

    with pytest.raises(UserCodeError, match="encoder e gave no embeddings"):
        await with_embeddings([sample(0, 0.0, 9)], embed)
