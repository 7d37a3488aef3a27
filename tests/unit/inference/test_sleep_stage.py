"""A colocated server says that it sleeps while its memory is released."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.colocated.server import ColocatedServer
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.names import ServerMemory, server_memory_key
from asyncrl.observe import observer
from asyncrl.runtime.process.waiting import cancel

KEY, URL = server_memory_key(0), "http://127.0.0.1:1"


def test_a_colocated_server_sleeps_while_the_memory_of_its_engine_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(resolver: FileResolver) -> None:
        stages: asyncio.Queue[str] = asyncio.Queue()
        monkeypatch.setattr(observer, "stage", lambda text, activity: stages.put_nowait(text))
        following = asyncio.create_task(ColocatedServer(resolver, 0, "generation_server/0", 9.0).follow_sleep(URL))
        states = [
            (ServerMemory(URL, released=False), observer.SERVES),
            (ServerMemory(URL, released=True), observer.SLEEPS),
            (None, observer.SERVES),
            (ServerMemory("http://127.0.0.1:2", released=True), observer.SERVES),
        ]
        for memory, stage in states:
            if memory is None:
                await asyncio.to_thread(resolver.delete, KEY)
            else:
                await asyncio.to_thread(resolver.add, KEY, memory.encode(), replace=True)
            assert await asyncio.wait_for(stages.get(), 60) == stage, memory
        await cancel(following)

    with FileResolver(tmp_path) as resolver:
        asyncio.run(play(resolver))
