"""Programs as agents: what they are given, how they are rewarded, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from asyncrl.api import Prompt, SamplingParams
from asyncrl.chat.template import ChatFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents import command, command_reward
from asyncrl.plugins.agents.command import CommandAgent, ProgramFailed
from asyncrl.plugins.agents.command_reward import RewardFailed
from tests.integration.endpoint.programs_of_episodes import ANSWER, Episodes, agent_of, dies, wait_until
from tests.ports import free_ports

Until = Callable[[Callable[[], bool]], Awaitable[None]]
TOLD = {"reward": f"{__file__}:as_told"}


@pytest_asyncio.fixture
async def episodes(
    endpoint: Endpoint, chat: ChatFormat, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Episodes]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield Episodes(endpoint, chat, load_tokenizer(tokenizer_folder))
    assert not [*(tmp_path / "temporary").iterdir()], "an episode's folder is left"


def as_told(prompt: Prompt, folder: Path, output: str) -> float | None:
    """What the program wrote as its reward, and what it saw as columns of the row."""
    prompt.data["seen"].update(json.loads((folder / "seen.json").read_text()), output=output, folder=folder)
    reward: float | None = prompt.data["reward"]
    return reward


async def test_a_program_is_given_address_files_and_a_folder_and_is_rewarded_for_what_it_leaves(
    episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    program = """
with open("answer.txt", "w") as file:
    file.write(ask(sys.argv[1]) + "|" + ask("again"))
home = os.environ["HOME"]
texts = [open(name).read() for name in ("of_row.txt", home + "/.config/a.json", "copied/command.py")]
seen = {"texts": texts[:2], "copied": len(texts[2]), "cwd": os.getcwd(), "env": dict(os.environ)}
json.dump(seen, open("seen.json", "w"))
print("done")
"""
    settings = '{"url": "{base_url}", "n": {row.n}, "t": "{{word}}", "b": "{brace}row.n}", "o": {}}'
    agent = agent_of(
        program,
        files={"~/.config/a.json": settings, "copied": {"path": str(Path(command.__file__).parent)}},
        row_files="files",
        env={"N": "{row.n}"},
        **TOLD,
    )
    seen: list[dict[str, Any]] = [{}, {}]
    size = len(inspect.getsource(command))
    files = {"of_row.txt": "{base_url} as it is"}
    played = await asyncio.gather(
        *(episodes.play(agent, n=number, files=files, seen=own, reward=0.5) for number, own in enumerate(seen))
    )
    for number, (own, samples) in enumerate(zip(seen, played, strict=True)):
        assert [sample.reward for sample in samples] == [0.5, 0.5], "the second question is a conversation of its own"
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == 2 * len(
            [*episodes.tokenizer.encode(ANSWER), 0]
        )
        assert {**samples[0].metrics, "program_s": 0} == {
            **{"exit_nonzero": 0.0, "timed_out": 0.0, "output_truncated": 0.0, "reward_failed": 0.0, "program_s": 0}
        }
        assert own["texts"][0] == files["of_row.txt"]
        config = json.loads(own["texts"][1])
        assert config["url"].startswith("http://127.0.0.1:")
        assert config | {"url": ""} == {"url": "", "n": number, "t": "{{word}}", "b": "{row.n}", "o": {}}
        assert own["copied"] == size
        assert own["cwd"] == "/tmp/episode/work", "the same for all, so that prompts share it"
        environment = own["env"]
        assert environment["HOME"] == "/tmp/episode/home"
        assert environment["N"] == str(number)
        assert environment["NO_PROXY"] == environment["no_proxy"] == "127.0.0.1"
        assert "SECRET_OF_THE_WORKER" not in environment
        assert own["output"] == "done\n"
        assert not own["folder"].exists(), "it ends with the episode"
    assert seen[0]["folder"] != seen[1]["folder"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": ["true", "{base_ulr}"]}, r"command\[1\]: no such placeholder: {base_ulr}; there are {base_url}"),
        ({"command": "true -x"}, "command='true -x': give a list"),
        ({"command": ["true", {"row.prompt": None}]}, "put it in quotation marks"),
        ({"command": ["no-such-program-anywhere"]}, "no such program here; install it on each host"),
        ({"env": {"HOME": "/root"}}, r"env\[HOME\]: is of each episode"),
        ({"files": {"../out.txt": ""}}, r"files\[../out.txt\]: no name below the episode's folder"),
        ({"files": {"a": {"path": "/no/such/file"}}}, "a file or folder to copy"),
        ({"reward": {"command": ["true", "{api_key}"]}}, r"reward: command\[1\]: no such placeholder: {api_key}"),
        ({"reward": {"command": ["true"], "limit": 3}}, "unexpected keyword argument 'limit'"),
        ({"reward": "json:loads"}, "is to take"),
        ({"reward": {"path": "json:loads", "timeout_s": 0}}, "reward: timeout_s=0"),
        ({"reward": {"command": ["true"], "failure_reward": math.nan}}, "reward: failure_reward=nan"),
        ({"path": "/proc/nowhere"}, "path='/proc/nowhere': a program's folder cannot be mounted there.*path=null"),
        ({"path": "here"}, "give an absolute path"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"image": "x", "engine": "no-such-engine"}, "install docker or podman"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_start(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommandAgent(**{"command": ["true"]} | args)


async def test_files_of_a_row_are_not_written_through_links_of_a_copied_folder(
    episodes: Episodes, tmp_path: Path
) -> None:
    for name in ("copied", "elsewhere"):
        (tmp_path / name).mkdir()
    mine = tmp_path / "elsewhere" / "mine.txt"
    mine.write_text("as it was")
    (tmp_path / "copied" / "folder").symlink_to(mine.parent)
    (tmp_path / "copied" / "file").symlink_to(mine)
    agent = agent_of('ask("a")', files={"copied": {"path": str(tmp_path / "copied")}}, row_files="files")
    await episodes.play(agent, files={"copied/file": "changed"})
    with pytest.raises(ValueError, match=r"work/copied/folder/new/mine.txt: a link above it leads out"):
        await episodes.play(agent, files={"copied/folder/new/mine.txt": "changed"})
    assert mine.read_text() == "as it was"
    assert [*mine.parent.iterdir()] == [mine]


async def test_a_program_starts_with_signals_as_a_shell_would_give_them(episodes: Episodes) -> None:
    program = """
ask("a")
slept = subprocess.Popen(["sleep", "600"], restore_signals=False)
slept.terminate()
json.dump({"ended": slept.wait(20), "ignored": open("ignored.txt").read()}, open("seen.json", "w"))
"""
    begins = 'grep SigIgn /proc/self/status > ignored.txt; exec "$0" -I agent.py'
    agent = agent_of("import subprocess" + program, command=["sh", "-c", begins, sys.executable], **TOLD)
    seen: dict[str, Any] = {}
    await episodes.play(agent, seen=seen, reward=1.0)
    assert seen["ended"] == -signal.SIGTERM
    ignored = int(seen["ignored"].split()[1], 16)
    assert not [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1]


async def test_where_nothing_can_be_mounted_each_program_may_have_its_own_path(episodes: Episodes) -> None:
    agent = agent_of('ask("a")\njson.dump({"cwd": os.getcwd()}, open("seen.json", "w"))', path=None, **TOLD)
    seen: dict[str, Any] = {}
    await episodes.play(agent, seen=seen, reward=1.0)
    assert seen["cwd"] == str(seen["folder"])


async def test_a_program_that_fails_is_rewarded_if_it_had_an_answer_and_else_fails_with_its_output(
    episodes: Episodes,
) -> None:
    (sample,) = await episodes.play(agent_of('ask("a")\nsys.exit("wrong")'))
    assert (sample.reward, sample.metrics["exit_nonzero"]) == (1.0, 1.0)
    with pytest.raises(
        ProgramFailed, match=r"(?s)no answer from the policy: it ended with exit code 3 after .*: oh no"
    ):
        await episodes.play(agent_of('print("oh no", file=sys.stderr)\nsys.exit(3)'))
    with pytest.raises(ValueError, match="the row has no field 'missing'; it has prompt"):
        await episodes.play(agent_of("", env={"X": "{row.missing}"}))
    episodes.fails = True
    with pytest.raises(RuntimeError, match="no server is left"):
        await episodes.play(agent_of('try:\n    ask("a")\nexcept OSError:\n    pass'))


LEAVES_A_PROCESS = """
ask("a")
if os.fork() == 0:  # neither a child of the program nor of its group or session
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1], sys.argv[1] + ".pid")
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1] + ".pid"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["by itself", "time limit", "cancelled"])
async def test_everything_that_a_program_started_ends_with_its_episode(
    end: str, episodes: Episodes, tmp_path: Path, until: Until
) -> None:
    hangs = "" if end == "by itself" else "time.sleep(600)"
    agent = agent_of(LEAVES_A_PROCESS + hangs, timeout_s=3.0 if end == "time limit" else None)
    agent._command[-1] = str(tmp_path / "grandchild")
    playing = asyncio.create_task(episodes.play(agent))
    left = tmp_path / "grandchild.pid"
    await until(lambda: left.exists() or playing.done())
    if end == "cancelled":
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        (sample,) = await playing
        assert sample.metrics["timed_out"] == float(end == "time limit"), "it is rewarded as it is"
    assert not psutil.pid_exists(int(left.read_text()))


async def test_of_an_endless_output_the_end_is_kept(episodes: Episodes) -> None:
    program = 'ask("a")\nfor i in range(20000):\n    print("0123456789" * 10)\nprint("the end")'
    (sample,) = await episodes.play(agent_of(program, output_kb=1, reward=None))
    (scored,) = episodes.scored
    assert scored.endswith("0123456789\nthe end")
    assert 1000 < len(scored) <= 1024
    assert (sample.reward, sample.metrics["output_truncated"]) == (len(scored), 1.0)


def judge(*lines: str, **more: Any) -> dict[str, Any]:
    script = "\n".join(("import os, sys, time", *lines))
    reward = {"command": [sys.executable, "-I", "../reward/judge.py", "{row.prompt}"], "files": {"judge.py": script}}
    return {"reward": reward | more}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("left", ["os.symlink(ELSEWHERE, '../reward')", "os.mkfifo('../reward')"])
async def test_a_reward_can_be_the_last_line_of_a_command_that_sees_the_folder(
    left: str, episodes: Episodes, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    left = left.replace("ELSEWHERE", repr(str(elsewhere)))
    wrong = 'for each in ("home", "tmp"):\n    open("../" + each + "/verdict", "w").write("9")\n'
    program = f'{wrong}open("a.txt", "w").write(ask("a"))\nprint("said")\n{left}'
    rewarded = judge(
        'places = [os.environ[name] for name in ("HOME", "TMPDIR")]',
        'assert [os.listdir(place) for place in places] == [[], []], "not what the program has left there"',
        f'right = open("a.txt").read() == {ANSWER!r} and open("../reward/output.txt").read() == "said\\n"',
        'assert sys.argv[1] == "2 + 2 = ?" and "KEY" not in os.environ',
        'print("a word before\\n", 0.25 + right, "\\n")',
    )
    (sample,) = await episodes.play(agent_of(program, **rewarded))
    assert sample.reward == 1.25
    assert not [*elsewhere.iterdir()], "the program cannot lead what is written for the reward out of its folder"


@pytest.mark.parametrize(
    ("rewarded", "message"),
    [
        (judge('print("right")'), r"is to be a number; it ended with exit code 0 after .*: right"),
        (judge("print(1.0)", "sys.exit(2)"), "it ended with exit code 2"),
        (judge('print("nan")'), "is to be a number"),
        (judge("print(1.0, flush=True)", "time.sleep(600)", timeout_s=0.5), "was ended at its time limit"),
        ({"reward": {"path": f"{__file__}:words"}}, "returned 'right'; return a finite number"),
        ({"reward": {"path": f"{__file__}:fails"}}, "the reward's function raised KeyError: 'x'"),
        ({"reward": {"path": f"{__file__}:hangs", "timeout_s": 0.5}}, "did not return within 0.5 s"),
    ],
)
async def test_a_reward_that_is_no_number_fails_the_episode_by_name_or_is_its_failure_reward(
    rewarded: dict[str, Any], message: str, episodes: Episodes
) -> None:
    agent = agent_of('ask("a")', **rewarded)
    with pytest.raises(RewardFailed, match=message):
        await episodes.play(agent)
    agent = agent_of('ask("a")', reward=rewarded["reward"] | {"failure_reward": -0.5})
    (sample,) = await episodes.play(agent)
    assert (sample.reward, sample.metrics["reward_failed"]) == (-0.5, 1.0)


async def test_calls_of_a_reward_that_never_return_are_not_without_end(
    episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_reward, "_MOST_CALLS", 1)
    agent = agent_of('ask("a")', reward={"path": f"{__file__}:hangs", "timeout_s": 0.1})
    for message in ("did not return", "is not called: 1 calls of it never returned"):
        with pytest.raises(RewardFailed, match=message):
            await episodes.play(agent)


@pytest.mark.parametrize("instead", ["str", "os.mkfifo", "lambda place: os.symlink('/', place)"])
async def test_a_program_that_removes_its_folder_is_judged(instead: str, episodes: Episodes) -> None:
    program = f'ask("a")\nos.remove("agent.py")\nos.rmdir("../work")\n({instead})("../work")'
    (sample,) = await episodes.play(agent_of(program, **judge("print(len(os.listdir()))")))
    assert sample.reward == 0.0


def words(prompt: Prompt, folder: Path) -> str:
    """Not a reward."""
    return "right"


def fails(prompt: Prompt, folder: Path) -> float:
    """Not a reward either."""
    raise KeyError("x")


def hangs(prompt: Prompt, folder: Path) -> float:
    """Longer than it may."""
    threading.Event().wait(30)
    return 1.0


DIES = """
    import asyncio, sys
    from asyncrl.plugins.agents.command import CommandAgent

    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"

    async def play():
        agent = CommandAgent(command=[sys.executable, "-c", program])
        async with agent._folder() as folder:
            print(folder, flush=True)
            await agent._ended(folder, agent._command, {}, None)

    asyncio.run(play())
"""


def test_a_program_ends_with_its_worker_and_the_next_worker_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, said = dies(DIES, tmp_path)
    folder = Path(said)
    pid = folder / "work" / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    program = psutil.Process(int(pid.read_text()))
    command.remove_abandoned(folder.parent)
    assert folder.is_dir(), "its worker lives"
    worker.kill()
    worker.wait()
    wait_until(lambda: not program.is_running())
    (folder / "work" / "closed").mkdir(mode=0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = command._Folders(None)
    mine.begin()
    assert [*tmp_path.glob("asyncrl-*")] == [mine.path]
    mine.end()
    assert [*tmp_path.glob("asyncrl-*")] == []


async def test_agents_get_the_advertised_name_and_the_fixed_port(policy: Any) -> None:
    (port,) = free_ports(1)
    one, other = Endpoint(port=port, advertise="host.docker.internal"), Endpoint(port=port)
    try:
        session = await one.open(policy, SamplingParams())
        assert session.base_url == f"http://host.docker.internal:{port}/s/{session.id}/v1"
        with pytest.raises(OSError, match=rf"rollout.endpoint.port={port} on 127.0.0.1 cannot be listened on"):
            await other.open(policy, SamplingParams())
    finally:
        await one.close()
        await other.close()
