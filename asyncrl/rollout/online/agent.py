"""The agent of an online run: its episodes are sessions that programs outside the run open, play and reward."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncrl.api import Agent, Environment, GroupClient, Prompt, Sample
from asyncrl.config.run_dir import ONLINE_DIR
from asyncrl.master.settings import OnStale
from asyncrl.observe import observer
from asyncrl.rollout.episode import Group
from asyncrl.rollout.online.door import Door
from asyncrl.rollout.online.sessions import Sessions
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.runtime.run_log import notice

KEY_FILE: Final = "key"


class OnlineAgent(Agent):
    """Plays nothing itself: a client opens a session at the run's door, plays by its address, and reports the reward;
    docs/online.md.

    Args:
        tokenizer: the run's tokenizer; not needed.
        lease_s: silence after which a session ends; its episode is lost.
        hold_s: time for which a session may keep a train step waiting (`on_stale=wait`); then it ends.
        wait_s: time for which a client waits for a session; then it gets 429, and may ask again.

    Raises:
        ValueError: one of them is not a positive number.
    """

    def __init__(
        self, *, tokenizer: object = None, lease_s: float = 300.0, hold_s: float = 60.0, wait_s: float = 60.0
    ) -> None:
        self.sessions = Sessions(lease_s, hold_s, wait_s)
        self.door: Door | None = None

    async def roll_out(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Have a client play the group.

        Raises:
            RuntimeError: there is no door: `agent.path` names another agent, or the run does not train.
        """
        if self.door is None or not isinstance(client, Group):
            raise RuntimeError("OnlineAgent has no door: agent.path has to name it, and evaluations another agent")
        return await self.door.play(prompt, client)


async def open_door(worker: AsyncWorker, components: UserComponents) -> Door:
    """Open the door of a RolloutWorker, and say where it is: in the run's folder and on the terminal."""
    agent: Any = components.agent
    config, folder = worker.config, worker.run_dir / ONLINE_DIR
    key = await asyncio.to_thread(run_key, folder)
    batch_size = config.train_batch_size if config.on_stale == OnStale.wait else 0
    components.conversations.make_endpoint = partial(Door, sessions=agent.sessions, key=key, batch_size=batch_size)
    door = components.conversations.endpoint
    assert isinstance(door, Door), "nothing has asked for the endpoint before"
    url = await door.listen()
    agent.door = door
    observer.gauges(door.figures)
    await asyncio.to_thread(_announce, folder / f"door-{worker.index}.json", url)
    notice(worker.run_dir, f"sessions are opened at {url}/v1/sessions with the key in {folder / KEY_FILE}")
    return door


def run_key(folder: Path) -> str:
    """Return the key that opens sessions of the run. The first of its RolloutWorkers makes it, for its owner only."""
    folder.mkdir(exist_ok=True)
    aside = folder / f".{secrets.token_hex(8)}"
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"sk-{secrets.token_urlsafe(32)}")
    with suppress(FileExistsError):
        os.link(aside, folder / KEY_FILE)
    aside.unlink()
    return (folder / KEY_FILE).read_text()


def _announce(file: Path, url: str) -> None:
    aside = file.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode({"url": url}))
    aside.replace(file)
