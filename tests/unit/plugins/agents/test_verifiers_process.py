"""The process that runs a `verifiers` environment answers with something that is not a reply."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.plugins.agents.verifiers_env import VerifiersDataset, VerifiersError, _Host

READY = '{"ready": true}'
ROWS = '{"train": {"rows": [{"prompt": "a"}]}, "held_out": {"error": "none is held out"}}'
STAYS = "exec sleep 600"
"""Last command of a program that does not end with its input."""


def program(folder: Path, *replies: str, last: str = "cat > /dev/null") -> str:
    """A program in place of the interpreter: prints a reply for each line that it reads, then does `last`."""
    script = folder / "python"
    lines = "".join(f"read -r line\necho '{reply}'\n" for reply in replies)
    script.write_text(f"#!/bin/sh\n{lines}{last}\n")
    os.chmod(script, 0o700)
    return str(script)


def test_a_line_that_is_not_a_reply_fails_the_rollouts_that_wait(tmp_path: Path) -> None:
    async def play() -> None:
        host = await _Host.start(program(tmp_path, '{"ready": true}', "not a reply"), "env", None)
        async with asyncio.timeout(10.0):
            with pytest.raises(VerifiersError, match="not a reply"):
                await host.run(0, "train", "http://127.0.0.1:1", "key")
            assert host.has_ended
            await host.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("not a reply", "cannot be loaded.*not a reply"),
        ("5", "cannot be loaded.*not a reply"),
        ('{"error": "no such environment"}', "cannot be loaded: no such environment"),
        (None, "was not loaded within"),
    ],
)
def test_an_environment_that_does_not_load_leaves_no_process(
    reply: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.plugins.agents.verifiers_env.START_LIMIT_S", 10.0 if reply else 0.1)

    async def play() -> None:
        async with asyncio.timeout(30.0):
            with pytest.raises(VerifiersError, match=message):
                await _Host.start(program(tmp_path, *([reply] if reply else [])), "env", None)

    asyncio.run(play())
    assert not any(str(tmp_path) in command for command in commands_of_children())


@pytest.mark.parametrize("reply", ["not a reply", "5"])
def test_rows_that_are_not_a_reply_are_an_error_with_the_environment(reply: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"env='mine': its process printed what is not a reply: b'{reply}"):
        VerifiersDataset(split="train", seed=0, python=program(tmp_path, reply, last=STAYS), env="mine")


@pytest.mark.timeout(30)
def test_a_process_that_stays_after_its_rows_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.plugins.agents.verifiers_env.END_LIMIT_S", 0.1, raising=False)
    python = program(tmp_path, ROWS, last=STAYS)
    assert len(VerifiersDataset(split="train", seed=0, python=python, env="env")) == 1
    with pytest.raises(ValueError, match="env='env': none is held out"):
        VerifiersDataset(split="held_out", seed=0, python=python, env="env")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("retired", [False, True])
def test_a_process_that_stays_after_its_input_is_killed(
    retired: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.plugins.agents.verifiers_env.END_LIMIT_S", 0.1, raising=False)

    async def play() -> None:
        host = await _Host.start(program(tmp_path, READY, last=STAYS), "env", None)
        try:
            async with asyncio.timeout(10.0):
                if retired:
                    host.retire()
                    await host._process.wait()
                await host.close()
        finally:
            if host._process.returncode is None:
                host._process.kill()
        assert host.has_ended

    asyncio.run(play())


@pytest.mark.timeout(30)
def test_an_environment_that_is_still_loading_as_its_episode_ends_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "podman").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "podman").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def has_left() -> bool:
        return any(str(tmp_path) in each or "verifiers.run=" in each for each in commands_of_children())

    async def play() -> None:
        args = {"runtime": {"type": "podman"}}
        starting = asyncio.create_task(_Host.start(program(tmp_path, last="read -r env\nread -r more"), "env", args))
        async with asyncio.timeout(20.0):
            while not any("verifiers.run=" in each for each in commands_of_children()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # it waits for the reply by now
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            while has_left():  # noqa: ASYNC110 - what happens is the other end's
                await asyncio.sleep(0.05)

    asyncio.run(play())
    assert (tmp_path / "asked").exists()


ENGINE = """#!/bin/sh
cd {folder}
echo "$@" >> asked
case $1 in
  ps) cat left;;
  rm) : > left;;
esac
"""


@pytest.mark.timeout(60)
def test_containers_of_a_process_that_was_killed_are_removed_by_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").write_text("c1\nc2\n")
    (tmp_path / "podman").write_text(ENGINE.format(folder=tmp_path))
    (tmp_path / "podman").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    args = {"solver": {"runtime": {"type": "podman"}}, "judge": {"runtime": {"type": "subprocess"}}}

    async def play() -> None:
        async with asyncio.timeout(30.0):
            host = await _Host.start(program(tmp_path, READY), "env", args)
            waiting = asyncio.create_task(host.run(0, "train", "http://127.0.0.1:1", "key"))
            await asyncio.sleep(0)
            host._process.kill()
            with pytest.raises(VerifiersError, match="ended"):
                await waiting
            await host.close()

    asyncio.run(play())
    assert (tmp_path / "left").read_text() == ""
    listed, killed, removed, *_ = (tmp_path / "asked").read_text().splitlines()
    assert listed.startswith("ps --all --quiet --filter label=verifiers.run=asyncrl-")
    assert (killed, removed) == ("kill c1 c2", "rm --force c1 c2")


FORKS = """
import os, signal, sys

def load_environment(env, *, pid_file):
    if (forked := os.fork()) == 0:
        signal.pause()
    with open(pid_file, "w") as file:
        file.write(str(forked))
    os._exit(3)
"""


@pytest.mark.timeout(60)
def test_an_environment_that_leaves_a_forked_process_is_seen_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forked process has the host's pipes, as a pool of `multiprocessing` does after a kill for memory."""
    clients = tmp_path / "verifiers" / "clients"
    clients.mkdir(parents=True)
    (tmp_path / "openai.py").write_text("def AsyncOpenAI(**_): pass")
    (clients.parent / "__init__.py").write_text(FORKS)
    (clients / "openai_chat_completions_client.py").write_text("OpenAIChatCompletionsClient = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid_file = tmp_path / "pid"

    async def play() -> None:
        async with asyncio.timeout(30.0):
            with pytest.raises(VerifiersError, match="cannot be loaded: its process ended"):
                await _Host.start(sys.executable, "env", {"pid_file": str(pid_file)})

    try:
        asyncio.run(play())
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def commands_of_children() -> Iterator[str]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also raised for a zombie, which another test may have left
            yield " ".join(child.cmdline())
