"""Folders from host to host over real HTTP, between staging servers of one loop."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.comm import http_client as http_module
from asyncrl.comm.http_client import HttpError, HttpRefused, HttpUnreachable, JsonHttp
from asyncrl.comm.http_server import HttpRoute, HttpServer
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.plugin_code.same_code import loaded_sources
from asyncrl.staging import client as client_module
from asyncrl.staging import fetch, store
from asyncrl.staging.client import INPUTS, MODEL, StageReply, StageRequest, StagingClient, source_failed
from asyncrl.staging.forwarding import HostClock, ObservedHome, ObservedLines
from asyncrl.staging.process import StagingService, send_observed
from asyncrl.weights.manifest import (
    Manifest,
    TensorEntry,
    file_entry,
    read_manifest,
    verify,
    write_manifest,
)
from asyncrl.weights.tensor_file import write_tensors

LARGE = bytes(range(256)) * (3 << 12)  # three pieces
Handler = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]
LIMIT_S = 300.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit is one of this machine's speed."""
    for module, name in ((http_module, "ANSWER_S"), (client_module, "_MARGIN_S"), (fetch, "SILENCE_S")):
        monkeypatch.setattr(module, name, LIMIT_S)


class Host:
    """A staging server with a disk of its own."""

    def __init__(self, disk: Path, security: HttpSecurity, home: ObservedHome | None = None) -> None:
        self.for_the_launch: list[tuple[str, Path]] = []
        self.disk = disk
        self.service = StagingService(disk / "staged", security, lambda *had: self.for_the_launch.append(had), home)
        self.url = ""

    async def stage(self, folder: str, source: str = "", path: str = "", **how: Any) -> StageReply:
        http = JsonHttp(self.security)
        try:
            return await StagingClient(http, self.url).stage(StageRequest(folder, path, source, **how))
        finally:
            await http.close()

    security: HttpSecurity


@pytest.fixture
async def start_host(tmp_path: Path, http_security: HttpSecurity) -> AsyncIterator[Callable[..., Awaitable[Host]]]:
    hosts: list[Host] = []

    async def start(name: str, home: ObservedHome | None = None) -> Host:
        host = Host(tmp_path / name, http_security, home)
        host.security = http_security
        host.url = await host.service.http.start("127.0.0.1")
        hosts.append(host)
        return host

    yield start
    for host in hosts:
        await host.service.close()


@pytest.fixture
async def start_bad_source(http_security: HttpSecurity) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """`start_bad_source(manifest, answer)`: a server that gives this manifest, and files as `answer` does."""
    servers: list[HttpServer] = []

    async def start(manifest: bytes, answer: Handler) -> str:
        async def give(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
            return web.Response(body=manifest)

        routes = {"/manifest": HttpRoute(give), "/file": HttpRoute(answer)}
        servers.append(HttpServer(routes, token=http_security.token, tls=http_security.server_context()))
        return await servers[-1].start("127.0.0.1")

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A version as the trainer leaves it."""
    return publish(tmp_path / "published" / "v1")


def publish(folder: Path, content: bytes = LARGE) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    (folder / "empty").touch()
    files = {name: file_entry(folder / name) for name in ("model.safetensors", "config.json", "empty")}
    write_manifest(folder, Manifest("actor", 1, files))
    return folder


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wrong(error: pytest.ExceptionInfo[HttpRefused]) -> str:
    assert source_failed(error.value)
    return str(error.value)


async def test_a_version_comes_to_a_host_and_from_there_to_the_next(start_host: Any, published: Path) -> None:
    origin, second, third = [await start_host(name) for name in ("one", "two", "three")]
    first = await origin.stage("v1", path=str(published))
    got = await second.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    assert got == StageReply(True, str(second.disk / "staged" / "v1"), first.manifest_sum)
    await origin.service.close()
    last = await third.stage("v1", second.url, manifest_sum=first.manifest_sum)
    assert verify(Path(last.path)) == read_manifest(published)
    assert (Path(last.path) / "model.safetensors").read_bytes() == LARGE


async def test_two_that_ask_at_the_same_time_share_one_fetch_and_who_asks_later_has_it(
    start_host: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))
    fetched: list[str] = []
    really = fetch._fetch_file

    async def counted(http: JsonHttp, url: str, *others: Any) -> None:
        fetched.append(url)
        await really(http, url, *others)

    monkeypatch.setattr(fetch, "_fetch_file", counted)
    asked = [host.stage("v1", origin.url, manifest_sum=first.manifest_sum) for _ in range(2)]
    one, other = await asyncio.gather(*asked)
    assert one == other == await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    assert len(fetched) == 3  # its files


async def test_the_origin_keeps_what_the_publisher_removes_until_nobody_wants_it(
    start_host: Any, published: Path, tmp_path: Path
) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))
    shutil.rmtree(published)
    assert (await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)).done
    await origin.stage("v2", path=str(publish(tmp_path / "published" / "v2")), keep=("v1",))
    assert listed(origin.disk / "staged") == ["v1", "v2"]
    await origin.stage("v3", path=str(publish(tmp_path / "published" / "v3")))
    assert listed(origin.disk / "staged") == ["v3"]


async def test_two_versions_that_come_together_remove_earlier_ones_once(
    start_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host("one")
    paths = {name: str(publish(tmp_path / "published" / name)) for name in ("v1", "v2", "v3", "v4")}
    await host.stage("v1", path=paths["v1"])
    await host.stage("v2", path=paths["v2"], keep=("v1",))
    removed: list[str] = []
    second = threading.Event()
    really = store.atomic_dir.remove

    def remove(folder: Path) -> None:
        """The first removal lasts until the other version's has begun."""
        removed.append(folder.name)
        assert second.wait(LIMIT_S) if len(removed) == 1 else second.set() is None
        really(folder)

    monkeypatch.setattr(store.atomic_dir, "remove", remove)
    both = [host.stage("v3", path=paths["v3"], keep=("v4",)), host.stage("v4", path=paths["v4"], keep=("v3",))]
    assert all(reply.done for reply in await asyncio.gather(*both))
    assert sorted(removed) == ["v1", "v2"]
    assert listed(host.disk / "staged") == ["v3", "v4"]


async def test_a_version_that_is_asked_for_while_it_is_removed_comes_again(
    start_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host("one")
    paths = {name: str(publish(tmp_path / "published" / name)) for name in ("v1", "v2")}
    await host.stage("v1", path=paths["v1"])
    begun, resume = threading.Event(), threading.Event()
    really = store.atomic_dir.remove

    def remove(folder: Path) -> None:
        begun.set()
        assert resume.wait(LIMIT_S)
        really(folder)

    monkeypatch.setattr(store.atomic_dir, "remove", remove)
    newer = asyncio.create_task(host.stage("v2", path=paths["v2"]))
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    older = host.service.store.stage(StageRequest("v1", paths["v1"], keep=("v2",)))
    await asyncio.wait({older}, timeout=0.3)  # enough for a removal that does not hold it up to undo it
    resume.set()
    assert verify((await older).path) == read_manifest(Path(paths["v1"]))
    assert (await newer).done
    assert listed(host.disk / "staged") == ["v1", "v2"]
    assert host.service.store.get("v1") is not None


async def test_an_older_request_removes_nothing_that_a_later_one_brought(
    start_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host("one")
    paths = {name: str(publish(tmp_path / "published" / name)) for name in ("v1", "v2")}
    begun, resume = threading.Event(), threading.Event()
    really = store.atomic_dir.begin

    def begin(folder: Path) -> Path:
        if folder.name == "v1":
            begun.set()
            assert resume.wait(LIMIT_S)
        return really(folder)

    monkeypatch.setattr(store.atomic_dir, "begin", begin)
    older = asyncio.create_task(host.stage("v1", path=paths["v1"]))
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    try:
        await host.stage("v2", path=paths["v2"], keep=("v1",))
    finally:
        resume.set()
    await older
    assert listed(host.disk / "staged") == ["v1", "v2"]


async def test_the_initial_model_is_served_from_where_it_lies_and_stays(
    start_host: Any, tmp_path: Path, published: Path
) -> None:
    model = tmp_path / "model"
    (model / "folder").mkdir(parents=True)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (model / "model.safetensors").write_bytes(LARGE)
    (model / "link").symlink_to(model / "model.safetensors")
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage(MODEL, path=str(model))
    copy = Path((await host.stage(MODEL, origin.url, manifest_sum=first.manifest_sum)).path)
    assert (origin.for_the_launch, host.for_the_launch) == ([(MODEL, model)], [(MODEL, copy)])
    assert listed(copy) == ["additional_chat_templates", "link", "manifest.json", "model.safetensors"]
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    assert verify(copy).version == 0
    await host.stage("v1", origin.url, manifest_sum=(await origin.stage("v1", path=str(published))).manifest_sum)
    assert listed(host.disk / "staged") == ["model", "v1"]
    assert "model.safetensors" in listed(model)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """As the launcher leaves them."""
    folder = tmp_path / "run" / "inputs"
    for name in ("inputs.json", "0/rewards.py", "1/main/train-0.jsonl", "empty"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name * (name != "empty"))
    return folder


async def test_what_rollout_workers_read_comes_with_its_folders_and_stays_beside_the_versions(
    start_host: Any, inputs: Path, published: Path
) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage(INPUTS, path=str(inputs))
    copy = Path((await host.stage(INPUTS, origin.url, manifest_sum=first.manifest_sum)).path)
    assert (origin.for_the_launch, host.for_the_launch) == ([(INPUTS, inputs)], [(INPUTS, copy)])
    assert (copy / "1" / "main" / "train-0.jsonl").read_text() == "1/main/train-0.jsonl"
    assert verify(copy).files.keys() == {"inputs.json", "0/rewards.py", "1/main/train-0.jsonl", "empty"}
    await host.stage("v1", origin.url, manifest_sum=(await origin.stage("v1", path=str(published))).manifest_sum)
    assert listed(host.disk / "staged") == ["inputs", "v1"]


async def test_what_rollout_workers_read_outlives_a_server_that_dies_unless_it_is_damaged_or_of_another_launch(
    start_host: Any, inputs: Path, http_security: HttpSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, dead = await start_host("one"), await start_host("two")
    first = await origin.stage(INPUTS, path=str(inputs))
    copy = Path((await dead.stage(INPUTS, origin.url, manifest_sum=first.manifest_sum)).path)
    fetched: list[str] = []
    really = fetch._fetch_file

    async def counted(http: JsonHttp, url: str, *others: Any) -> None:
        fetched.append(url)
        await really(http, url, *others)

    monkeypatch.setattr(fetch, "_fetch_file", counted)
    successor = await start_host("two")
    assert (copy / "inputs.json").is_file()
    await successor.stage(INPUTS, origin.url, manifest_sum=first.manifest_sum)
    assert fetched == []
    (copy / "0" / "rewards.py").write_text("else")
    await (await start_host("two")).stage(INPUTS, origin.url, manifest_sum=first.manifest_sum)
    assert len(fetched) == 4
    assert (copy / "0" / "rewards.py").read_text() == "0/rewards.py"
    (inputs / "0" / "rewards.py").write_text("of another launch")
    other = await (await start_host("three")).stage(INPUTS, path=str(inputs))
    another = await start_host("one again")
    assert (await another.stage(INPUTS, path=str(inputs))).manifest_sum == other.manifest_sum
    await (await start_host("two")).stage(INPUTS, another.url, manifest_sum=other.manifest_sum)
    assert (copy / "0" / "rewards.py").read_text() == "of another launch"


async def test_code_of_another_host_is_compared_with_that_of_this_one(
    start_host: Any, http_security: HttpSecurity
) -> None:
    host, http = await start_host("one"), JsonHttp(http_security)
    try:
        client = StagingClient(http, host.url)
        staging = "asyncrl.staging."
        sums = {name: sum_ for name, sum_ in loaded_sources().items() if name.startswith(staging)}
        assert "asyncrl.staging.store" in sums
        assert await client.code_differences(sums) == {}
        other = sums | {"asyncrl.staging.store": "0" * 16, "asyncrl.nowhere": "0" * 16}
        reported = await client.code_differences(other)
        assert reported.keys() == {"asyncrl.staging.store", "asyncrl.nowhere"}
        with pytest.raises(HttpRefused) as refused:
            await http.call("POST", f"{host.url}/same_code", {"sums": 1}, timeout_s=LIMIT_S)
        assert refused.value.status == 400
    finally:
        await http.close()


def publish_bf16(folder: Path, version: int) -> Path:
    """A version in bf16, of which little changes from one to the next."""
    folder.mkdir(parents=True)
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights[: 100 * version : 7] += 1
    write_tensors(folder / "model.safetensors", {"w": weights})
    (folder / "config.json").write_text("{}")
    files = {name: file_entry(folder / name) for name in ("model.safetensors", "config.json")}
    tensors = {"w": TensorEntry((100_000,), "BF16", "model.safetensors")}
    write_manifest(folder, Manifest("actor", version, files, tensors))
    return folder


async def test_a_later_version_comes_as_what_changed_is_passed_on_and_goes_with_it(
    start_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, second, third = hosts = [await start_host(name) for name in ("one", "two", "three")]
    sums = {}
    for version in (1, 2):
        name = f"v{version}"
        folder = publish_bf16(tmp_path / "published" / name, version)
        sums[name] = (await origin.stage(name, path=str(folder), keep=("v1",))).manifest_sum
    fetched: list[str] = []
    really, write_delta = JsonHttp.pieces, store.write_delta

    def counted(http: JsonHttp, url: str, **how: Any) -> Any:
        fetched.append(url.partition("?")[0].rpartition("/")[2])
        return really(http, url, **how)

    monkeypatch.setattr(JsonHttp, "pieces", counted)
    for host, source in ((second, origin), (third, second)):
        await host.stage("v1", origin.url, manifest_sum=sums["v1"])
        fetched.clear()
        copy = Path((await host.stage("v2", source.url, manifest_sum=sums["v2"], keep=("v1",))).path)
        assert fetched == ["manifest", "delta"], "the configuration did not change"
        assert verify(copy).version == 2
        assert (copy / "config.json").samefile(copy.parent / "v1" / "config.json")
        monkeypatch.setattr(store, "write_delta", None)  # the second passes on what it got
    monkeypatch.setattr(store, "write_delta", write_delta)
    assert load_file(copy / "model.safetensors")["w"][0] == load_file(copy.parent / "v1" / "model.safetensors")["w"][0]
    sizes = [file.stat().st_size for host in hosts for file in (host.disk / "staged" / "deltas").rglob("model*")]
    assert len(sizes) == 3
    assert max(sizes) < 0.1 * (copy / "model.safetensors").stat().st_size
    folder = publish_bf16(tmp_path / "published" / "v3", 3)
    await origin.stage("v3", path=str(folder))
    assert listed(origin.disk / "staged") == ["deltas", "v3"]
    assert listed(origin.disk / "staged" / "deltas") == []


@pytest.mark.parametrize("fault", ["the host's former file is damaged", "the source's is", "the source has it no more"])
async def test_where_a_delta_leads_wrong_the_whole_file_comes(start_host: Any, tmp_path: Path, fault: str) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(publish_bf16(tmp_path / "published" / "v1", 1)))
    former = Path((await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)).path) / "model.safetensors"
    keep = () if fault == "the source has it no more" else ("v1",)
    second = await origin.stage("v2", path=str(publish_bf16(tmp_path / "published" / "v2", 2)), keep=keep)
    damaged = {"the host's former file is damaged": former, "the source's is": Path(first.path) / "model.safetensors"}
    if (file := damaged.get(fault)) is not None:
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
    copy = Path((await host.stage("v2", origin.url, manifest_sum=second.manifest_sum)).path)
    assert verify(copy).version == 2
    assert not list((host.disk / "staged").rglob("deltas/*/model*"))


async def test_a_large_file_comes_in_streams_each_of_which_goes_on_where_it_was_cut_off(
    start_host: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))
    monkeypatch.setattr(fetch, "STREAM_BYTES", len(LARGE) // 3)
    asked: list[tuple[int, int | None]] = []
    really = JsonHttp.pieces

    async def cut_off(http: JsonHttp, url: str, *, begin: int = 0, end: int | None = None, **how: Any) -> Any:
        if "model.safetensors" in url:
            asked.append((begin, end))
        async for piece in really(http, url, begin=begin, end=end, **how):
            if "model.safetensors" in url and len(piece) > 1000 and len(asked) < 6:
                yield piece[:1000]
                raise HttpUnreachable("cut off")
            yield piece

    monkeypatch.setattr(JsonHttp, "pieces", cut_off)
    got = await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    assert (Path(got.path) / "model.safetensors").read_bytes() == LARGE
    third = len(LARGE) // 3
    assert asked[:3] == [(0, third), (third, 2 * third), (2 * third, None)]
    assert all(begin % third for begin, _ in asked[3:]), "from where it was"


async def test_another_version_of_the_same_number_replaces_the_former(
    start_host: Any, published: Path, tmp_path: Path
) -> None:
    """A run that went back to a checkpoint takes other steps from there."""
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))
    await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    other = publish(tmp_path / "again" / "v1", b"other weights")
    second = await origin.stage("v1", path=str(other))
    assert second.manifest_sum != first.manifest_sum
    got = await host.stage("v1", origin.url, manifest_sum=second.manifest_sum)
    assert (Path(got.path) / "model.safetensors").read_bytes() == b"other weights"


async def test_a_source_that_is_not_there_or_has_something_else_is_named(start_host: Any, published: Path) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))
    with pytest.raises(HttpRefused, match="there is no folder 'v2' here") as missing:
        await host.stage("v2", origin.url, manifest_sum=first.manifest_sum)
    assert wrong(missing)
    with pytest.raises(HttpRefused, match="not that folder") as other:
        await host.stage("v1", origin.url, manifest_sum="0" * 16)
    assert wrong(other)
    await origin.service.close()
    with pytest.raises(HttpRefused, match="broke off") as dead:
        await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    assert origin.url in wrong(dead)
    assert not (host.disk / "staged" / "v1").exists()


async def test_a_damaged_byte_on_the_source_is_found_and_the_next_source_is_good(
    start_host: Any, published: Path
) -> None:
    origin, second, third = [await start_host(name) for name in ("one", "two", "three")]
    first = await origin.stage("v1", path=str(published))
    copy = Path((await second.stage("v1", origin.url, manifest_sum=first.manifest_sum)).path)
    (copy / "model.safetensors").write_bytes(LARGE[:-1] + b"!")
    with pytest.raises(HttpRefused, match="the manifest says") as damaged:
        await third.stage("v1", second.url, manifest_sum=first.manifest_sum)
    assert "name=model.safetensors" in wrong(damaged)
    assert not (third.disk / "staged" / "v1").exists()
    assert (await third.stage("v1", origin.url, manifest_sum=first.manifest_sum)).done


async def test_an_answer_that_is_cut_off_too_long_or_silent_is_refused(
    start_host: Any, start_bad_source: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host("two")
    manifest = (published / "manifest.json").read_bytes()

    async def cut_off(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(LARGE)
        await response.prepare(request)
        await response.write(LARGE[:1000])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def too_long(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        return web.Response(body=LARGE + b"more")

    async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.get_running_loop().create_future()
        return response

    for answer, why in ((cut_off, "broke off"), (too_long, "the manifest says"), (silent, "was silent")):
        url = await start_bad_source(manifest, answer)
        monkeypatch.setattr(fetch, "SILENCE_S", 0.5 if answer is silent else LIMIT_S)
        with pytest.raises(HttpRefused, match=why) as error:
            await host.stage("v1", url, manifest_sum=fetch.sum_of(manifest))
        assert wrong(error)
        assert not (host.disk / "staged" / "v1").exists()


async def test_a_host_without_room_is_at_fault_itself(
    start_host: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, host = await start_host("one"), await start_host("two")
    first = await origin.stage("v1", path=str(published))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_put", full)
    with pytest.raises(HttpRefused, match="No space left") as error:
        await host.stage("v1", origin.url, manifest_sum=first.manifest_sum)
    assert not source_failed(error.value)


async def test_strangers_get_nothing_and_no_path_leads_out_of_a_folder(
    start_host: Any, published: Path, tmp_path: Path, http_security: HttpSecurity
) -> None:
    origin = await start_host("one")
    await origin.stage("v1", path=str(published))
    stranger, friend = JsonHttp(RunSecret.create(tmp_path / "other").http()), JsonHttp(http_security)
    with pytest.raises(HttpError):
        await stranger.call("GET", f"{origin.url}/manifest?folder=v1", timeout_s=LIMIT_S)
    for query in ("folder=v1&name=../../one/staged/v1/config.json", "folder=..&name=config.json", "folder=v1"):
        with pytest.raises(HttpRefused) as refused:
            await friend.call("GET", f"{origin.url}/file?{query}", timeout_s=LIMIT_S)
        assert refused.value.status == 404
    with pytest.raises(HttpRefused) as outside:
        await origin.stage("../v1", path=str(published))
    assert outside.value.status == 400
    await stranger.close()
    await friend.close()


async def test_lines_about_processes_come_to_the_launchers_host_and_wait_while_it_does_not_answer(
    start_host: Callable[..., Awaitable[Host]],
    tmp_path: Path,
    http_security: HttpSecurity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("launcher", "other"):
        (tmp_path / folder / "observed").mkdir(parents=True)
    there = tmp_path / "other" / "observed" / "generation_server-1.jsonl"
    there.write_text('{"at": 1e9, "since": 1e9, "stage": "decodes"}\n')
    launcher = await start_host("launcher", ObservedHome(tmp_path / "launcher"))
    other = await start_host("other")
    clock, lines = HostClock(), ObservedLines(tmp_path / "other")
    http = JsonHttp(http_security)
    try:
        with pytest.raises(HttpRefused, match="on another host"):
            await send_observed(StagingClient(http, other.url), clock, lines)
        home = StagingClient(http, launcher.url)
        await send_observed(home, clock, lines)
        arrived = tmp_path / "launcher" / "observed" / there.name
        assert not arrived.exists(), "the clock was not known"
        assert clock.ahead_s is not None
        assert abs(clock.ahead_s) <= clock.figures()["clock_within_s"] + 1e-4, "one clock, on one machine"
        with monkeypatch.context() as broken:
            broken.setattr(ObservedHome, "append", _disk_full)
            with pytest.raises(HttpRefused, match="No space left on device"):
                await send_observed(home, clock, lines)
        await send_observed(home, clock, lines)
        await send_observed(home, clock, lines)
        assert len(arrived.read_text().splitlines()) == 1
    finally:
        await http.close()


def _disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
