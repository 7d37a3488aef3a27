"""Programs in containers of docker and podman, with a daemon of these tests and an image of busybox."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.chat.template import ChatFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents import command
from asyncrl.plugins.agents.command import CommandAgent, ProgramFailed
from asyncrl.plugins.agents.command_files import remove
from asyncrl.plugins.agents.containers import EngineFailed
from tests.integration.endpoint.programs_of_episodes import ADDRESS, ANSWER, Episodes, dies, wait_until

Until = Callable[[Callable[[], bool]], Awaitable[None]]
NEEDED = {"docker": ("docker", "dockerd"), "podman": ("podman", "runc", "catatonit")}
IMAGE = "asyncrl-test"
ASK = """
wget -q -O answer.json --header "Authorization: Bearer $KEY" --header "Content-Type: application/json" \
    --post-data '{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}' "$BASE/chat/completions"
"""


@dataclass
class Running:
    """An engine with an image; of docker with its daemon, whose data is in `folder`."""

    words: list[str]
    folder: Path
    daemon: subprocess.Popen[bytes] | None = None
    run_args: list[str] = field(default_factory=list)

    def asked(self, *words: str, limit_s: float = 60.0) -> str:
        asked = subprocess.run([*self.words, *words], capture_output=True, text=True, timeout=limit_s, check=True)
        return asked.stdout.strip()

    def start(self) -> None:
        """Start docker's daemon, and wait until it answers."""
        own = self.folder
        # a containerd that died with its daemon, and that nobody has reaped, counts as running
        (own / "exec-root" / "containerd" / "containerd.pid").unlink(missing_ok=True)
        places = [f"--{name}={own / name}" for name in ("data-root", "exec-root", "pidfile")]
        without_network = ("--bridge=none", "--iptables=false", "--ip-masq=false")
        with (own / "log").open("ab") as log:
            arguments = ["dockerd", f"--host=unix://{own}/socket", *places, *without_network]
            self.daemon = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
        ends_at = time.monotonic() + 60.0
        while subprocess.run([*self.words, "version"], capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < ends_at, (own / "log").read_text()[-2000:]
            time.sleep(0.1)

    def agent(self, program: str, **args: Any) -> CommandAgent:
        given: dict[str, Any] = {"command": ["sh", "agent.sh"], "files": {"agent.sh": program}, "env": ADDRESS}
        rewarded = {"command": ["sh", "-c", "grep -q '{row.right}' answer.json && echo 1 || echo 0"]}
        of_engine = {"image": IMAGE, "engine": self.words, "network": "host", "run_args": self.run_args}
        return CommandAgent(**given | {"reward": rewarded} | of_engine | args)


def image_of_busybox(folder: Path) -> Path:
    """The files of an image."""
    file = folder / "image.tar"
    with tarfile.open(file, "w") as image:
        image.add(shutil.which("busybox") or "", "bin/busybox")
        for name in ("sh", "wget", "sleep", "grep", "id", "touch"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
    return file


@pytest.fixture(scope="module", params=NEEDED)
def engine(request: pytest.FixtureRequest) -> Iterator[Running]:
    if missing := [name for name in (*NEEDED[request.param], "busybox") if shutil.which(name) is None]:
        pytest.skip(f"no {missing[0]} on PATH (Debian: docker.io podman runc catatonit busybox-static)")
    if b"ld-linux" in Path(shutil.which("busybox") or "").read_bytes()[:4096]:  # its interpreter
        pytest.skip("busybox needs libraries that no image has (Debian: busybox-static)")
    if os.getuid() != 0:
        pytest.skip("containers are tried as root")
    folder = Path(tempfile.mkdtemp(prefix="engine-"))  # the path of a socket is short
    if request.param == "docker":
        made = Running(["docker", f"--host=unix://{folder}/socket"], folder)
        made.start()
    else:
        places = [f"--root={folder}/root", f"--runroot={folder}/run"]
        # crun and runc differ in which control groups they take, and limits of files cannot always be raised
        made = Running(["podman", *places, "--runtime=runc", "--cgroup-manager=cgroupfs"], folder)
        made.run_args = ["--ulimit=nofile=20000:20000", "--ulimit=nproc=4096:4096"]
    made.asked("import", str(image_of_busybox(folder)), IMAGE)
    yield made
    if made.daemon is not None:
        made.daemon.terminate()
        made.daemon.wait(60)
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    subprocess.run(["umount", *reversed([place for place in mounted if place.startswith(f"{folder}/")])], check=False)
    remove(folder)
    assert not folder.exists()


@pytest_asyncio.fixture
async def episodes(
    endpoint: Endpoint, chat: ChatFormat, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Episodes]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield Episodes(endpoint, chat, load_tokenizer(tokenizer_folder))
    assert not glob.glob(f"{tmp_path}/asyncrl-*"), "an episode's folder is left"


async def test_a_program_in_a_container_asks_the_policy_and_is_rewarded_there(
    episodes: Episodes, engine: Running
) -> None:
    program = (
        f'{ASK}\n[ -z "$LANG" ] && [ $PWD = /tmp/episode/work ] && touch $HOME/mine\nid -u > uid\necho said\nexit 3'
    )
    reward = {"command": ["sh", "-c", "grep -q '{row.right}' answer.json && grep -qx 0 uid && echo 1"]}
    agent = engine.agent(program, reward=reward)
    (sample,) = await episodes.play(agent, right=ANSWER)
    assert (sample.reward, sample.metrics["exit_nonzero"]) == (1.0, 1.0)
    with pytest.raises(
        ProgramFailed, match=r"sh got no answer from the policy: it ended with exit code 127 .*: not found"
    ):
        await episodes.play(engine.agent("exec no-such-program"), right="")
    assert engine.asked("ps", "--all", "--quiet") == ""


async def test_what_a_container_needs_is_refused_by_name(
    episodes: Episodes, engine: Running, endpoint: Endpoint
) -> None:
    with pytest.raises(
        ValueError, match=r"image='no-such-image': .* cannot use it \(.*(o such image|not known).*pull or build"
    ):
        engine.agent("", image="no-such-image")
    with pytest.raises(EngineFailed, match=r"does not reach the endpoint at 127\.0\.0\.1.*rollout.endpoint.host"):
        await episodes.play(engine.agent("", network="bridge"), right="")
    agent = engine.agent("")
    agent._engine.image = "gone-meanwhile"  # type: ignore[union-attr]
    with pytest.raises(EngineFailed, match=r"ended with exit code 125.*gone-meanwhile"):
        await episodes.play(agent, right="")


@pytest.mark.parametrize("end", ["time limit", "cancelled"])
async def test_a_container_ends_with_its_episode(end: str, episodes: Episodes, engine: Running, until: Until) -> None:
    agent = engine.agent(f"{ASK}\ntouch asked\nsleep 600", timeout_s=6.0 if end == "time limit" else None)
    playing = asyncio.create_task(episodes.play(agent, right=ANSWER))
    await until(lambda: playing.done() or _asked(agent))
    if end == "cancelled":
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        assert [sample.reward for sample in await playing] == [1.0], "it is rewarded as it is"
    assert engine.asked("ps", "--all", "--quiet") == ""


def _asked(agent: CommandAgent) -> bool:
    return agent._folders is not None and bool([*agent._folders.path.glob("*/work/asked")])


@pytest.mark.parametrize("engine", ["docker"], indirect=True)  # podman has no daemon
async def test_where_the_engine_dies_the_episode_fails_by_name_and_the_next_ones_run(
    episodes: Episodes, engine: Running, until: Until
) -> None:
    assert engine.daemon is not None
    agent = engine.agent(f"{ASK}\ntouch asked\nsleep 600")
    playing = asyncio.create_task(episodes.play(agent, right=ANSWER))
    await until(lambda: playing.done() or _asked(agent))
    engine.daemon.send_signal(signal.SIGKILL)
    engine.daemon.wait()
    with pytest.raises(EngineFailed, match="docker ended with exit code 125"):
        await playing
    with pytest.raises(EngineFailed, match=r"docker ended with exit code 125.*[Cc]annot connect"):
        await episodes.play(agent, right=ANSWER)
    with pytest.raises(ValueError, match=r"cannot use it.*start the engine"):
        engine.agent("")
    engine.start()
    agent._command[-1] = "short.sh"
    agent._files["short.sh"] = ASK
    assert [sample.reward for sample in await episodes.play(agent, right=ANSWER)] == [1.0]
    assert agent._folders is None, "the container that was left is removed"
    assert engine.asked("ps", "--all", "--quiet") == ""


KILLED = """#!/bin/sh
cd "$(dirname "$0")"
case $1 in
    run) rm -f *.ed; kill -KILL $$ ;;
    ps) if [ -e seen.ed ] && [ ! -e removed.ed ]; then echo 1234; fi; touch seen.ed ;;
    rm) [ -e refuses ] || touch removed.ed ;;
esac
"""
"""An engine whose command is killed just after it asked for a container, which is there at the second look."""


async def test_no_episode_is_judged_while_its_container_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine"
    engine.write_text(KILLED)
    engine.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent = CommandAgent(command=["true"], image=IMAGE, engine=str(engine))
    async with agent._folder() as folder:
        ended = await agent._ended(folder, ["true"], {}, None)
        assert ended.exit_code == 128 + signal.SIGKILL
        assert (tmp_path / "removed.ed").exists()
        (tmp_path / "refuses").touch()
        with pytest.raises(EngineFailed, match="may still run and change what is judged"):
            await agent._ended(folder, ["true"], {}, None)
        (tmp_path / "refuses").unlink()
        await agent._ended(folder, ["true"], {}, None)
    assert agent._folders is None, "what was left is removed with a later episode"


DIES = """
    import asyncio, json, sys
    from asyncrl.plugins.agents.command import CommandAgent

    async def play():
        agent = CommandAgent(command=["sleep", "600"], **json.loads(sys.argv[1]))
        async with agent._folder() as folder:
            print(agent._folders.path, flush=True)
            await agent._ended(folder, agent._command, {}, None)

    asyncio.run(play())
"""


def test_containers_of_a_dead_worker_are_removed_at_the_next_start(
    engine: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"image": IMAGE, "engine": engine.words, "network": "host", "run_args": engine.run_args}
    worker, said = dies(DIES, tmp_path, json.dumps(args))
    folder = Path(said)
    wait_until(lambda: engine.asked("ps", "--quiet", f"--filter=label=asyncrl.worker={folder.name}"))
    worker.kill()
    worker.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command._Folders(None)
    assert engine.asked("ps", "--all", "--quiet") == ""
    assert not folder.exists()
