"""Every worker learns of each server that left service, however many did at once."""

from __future__ import annotations

import time

import pytest

from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService


async def test_every_one_of_512_servers_that_are_lost_at_once_is_told() -> None:
    service = ManagerService(
        batch_size=1, max_staleness=0, routing="least_requests", lease_s=1e9, order=DataOrder(1, 0)
    )
    urls = [f"http://{index}" for index in range(512)]
    for index, url in enumerate(urls):
        service.router.update(index, url, 0, True)
    ask = m.LostServersRequest(worker="w0", after=-1)
    after = (await service.lost_servers(ask)).seq
    for _ in range(3):  # and again, as one that comes and goes takes no place of another
        for url in urls:
            service.routes.server_lost(url)
    reply = await service.lost_servers(m.LostServersRequest(worker="w0", after=after))
    assert (reply.urls, reply.seq) == (urls, after + 3 * 512)
    assert (await service.lost_servers(m.LostServersRequest(worker="w0", after=reply.seq - 2))).urls == urls[-2:]
    for number in range(10_000):
        service.routes.server_lost(f"http://once/{number}")
    assert len(service.routes.losses) == 4 * 512


async def test_a_later_manager_numbers_above_all_of_an_earlier_one_though_its_host_has_another_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def service(number: int, now: int) -> ManagerService:
        monkeypatch.setattr(time, "time_ns", lambda: now)
        order = DataOrder(1, 0)
        return ManagerService(
            batch_size=1, max_staleness=0, routing="least_requests", lease_s=1e9, order=order, number=number
        )

    first, second = service(3, 1 << 60), service(4, 1 << 50)
    for number in range(100):
        first.routes.server_lost(f"http://{number}")
    before = (await first.lost_servers(m.LostServersRequest(worker="w0", manager=3, after=-1))).seq
    second.routes.server_lost("http://later")
    lost = await second.lost_servers(m.LostServersRequest(worker="w0", manager=4, after=before))
    assert lost.urls == ["http://later"]
