"""Waiters for a change are woken in turn."""

import asyncio

from asyncrl.comm.waits import Notifier


async def test_those_who_have_waited_longest_are_woken_first() -> None:
    signal, woken = Notifier(), []
    held = []  # what lies between the futures in memory, so that their addresses are in no order

    async def wait(number: int) -> None:
        await signal.wait(60.0)
        woken.append(number)

    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(wait(number)))
        held.append(bytearray(37 * (number % 11)))
        await asyncio.sleep(0)
        if number % 3 == 0:
            held.pop(len(held) // 2)
    signal.notify()
    await asyncio.gather(*tasks)
    assert woken == list(range(200))


async def test_who_stopped_waiting_is_forgotten() -> None:
    signal = Notifier()
    assert not await signal.wait(0.0)
    signal.next().cancel()
    await asyncio.sleep(0)
    assert not signal._waiters
