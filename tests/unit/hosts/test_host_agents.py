"""Processes on other hosts: one agent for each, which dials the launcher; the other hosts are this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from asyncrl.comm.http_client import HttpRefused, JsonHttp
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import read_run_config, run_dir_of, write_run_config
from asyncrl.hosts import agent, agent_backend
from asyncrl.hosts.agent import SLOT_VARIABLE, Agent, Refused
from asyncrl.hosts.agent_backend import AgentBackend
from asyncrl.hosts.kubernetes import Backend as PodBackend
from asyncrl.hosts.link import Call, Order, Parcel, Start
from asyncrl.hosts.slurm import Backend as SlurmBackend
from asyncrl.runtime import backends
from asyncrl.runtime.backends import WorkerHandle
from asyncrl.runtime.plan import WorkerPlan
from asyncrl.runtime.settings import HostConfig
from asyncrl.runtime.trials.claim import TrialClaim, TrialError

LIMIT_S = 300.0
LINES = 2000
WAITS = """
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: os._exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


PROGRAMS: list[str] = []


def plan_of(program: str, host: str = "box2") -> WorkerPlan:
    """A process that runs this Python code on another host."""
    PROGRAMS.append(program)
    return WorkerPlan("toy", len(PROGRAMS) - 1, host=HostConfig(name=host))


class Backend(AgentBackend):
    """Runs the agent of the other host here, as `ssh` would there."""

    before = ""
    """Python code that the agent runs first."""
    shell: tuple[str, ...] = ()

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return the command itself."""
        return [*self.shell, *command[:-1], command[-1].replace("; from", f"; {self.before}from")]

    def agent_process(self) -> psutil.Process:
        """The agent that runs for this back end."""
        (mine,) = [each.carrier for each in self._agents.values()]
        assert mine is not None
        return psutil.Process(mine.pid)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(backends, "adopt_orphans", lambda: None)  # of the test's own process
    monkeypatch.setattr(backends, "kill_descendants", lambda *_, **__: None)

    def command(plan: WorkerPlan, run_dir: Path) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[plan.index]]

    monkeypatch.setattr(WorkerPlan, "command", command)
    config = ExperimentConfig()
    config.system.hosts = [HostConfig(address="127.0.0.1"), HostConfig(name="box2"), HostConfig(name="box3")]
    config.system.start_timeout_s = 100.0
    write_run_config(config, tmp_path)
    RunSecret.create(tmp_path / "secret")
    return tmp_path


@pytest.fixture
async def backend(run_dir: Path) -> AsyncIterator[Backend]:
    made = Backend(run_dir)
    yield made
    await made.close()


async def end_of(worker: WorkerHandle) -> int | None:
    async with asyncio.timeout(LIMIT_S):
        await worker.wait()
    return worker.exit_code


async def printed_by(worker: WorkerHandle, lines: int = 1) -> list[str]:
    """Wait for that many lines of its log, and return all."""
    await await_that(lambda: worker.log.read_text().count("\n") >= lines)
    return worker.log.read_text().splitlines()


async def process_of(worker: WorkerHandle) -> psutil.Process:
    return psutil.Process(int((await printed_by(worker))[0]))


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


async def await_that(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_processes_of_a_host_share_one_agent_and_each_has_its_log_and_exit_code(backend: Backend) -> None:
    programs = ("print(1); exit(3)", "exit(1)", "import os; os.abort()", "print(open('/nowhere'))")
    workers = [await backend.start(plan_of(program)) for program in programs]
    assert [await end_of(worker) for worker in workers] == [3, 1, -signal.SIGABRT, 1]
    assert workers[0].last_lines() == ["1"]
    assert "No such file" in workers[3].last_lines()[-1]
    assert {worker.description for worker in workers} == {"on box2"}
    agents = [
        child for child in psutil.Process().children() if runs(child) and "hosts.agent" in " ".join(child.cmdline())
    ]
    assert len(agents) == 1
    reported = " ".join(agents[0].cmdline()) + " ".join(agents[0].environ().values())
    assert (await asyncio.to_thread(RunSecret.load, backend.run_dir / "secret")).token not in reported


async def test_a_process_is_asked_to_stop_and_a_killed_one_takes_what_it_started_along(backend: Backend) -> None:
    forks = "import os, time\nif os.fork() == 0: os.setsid(); print(os.getpid(), flush=True)\ntime.sleep(600)"
    asked, killed, at_once = [await backend.start(plan_of(program)) for program in (WAITS, forks, WAITS)]
    at_once.kill_process()  # nothing has been started yet
    await printed_by(asked)
    child = await process_of(killed)
    asked.terminate()
    killed.kill()
    assert [await end_of(worker) for worker in (asked, killed, at_once)] == [7, -signal.SIGKILL, -signal.SIGKILL]
    await await_that(lambda: not runs(child))


async def test_a_large_environment_arrives_and_one_that_no_host_takes_is_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        monkeypatch.setenv(f"LARGE{number}", "x" * 100_000)
    monkeypatch.setitem(os.environb, b"ODD", b"\xff")  # type: ignore[misc]
    worker = await backend.start(
        plan_of("import os; print(sum(len(os.environ[f'LARGE{n}']) for n in range(3)), os.environb[b'ODD'])")
    )
    assert (await end_of(worker), worker.last_lines()) == (0, [r"300000 b'\xff'"])
    monkeypatch.setattr(agent_backend, "LONGEST_MESSAGE", 200_000)
    with pytest.raises(TrialError, match=r"settings and environment have \d{6} bytes, and another host takes at most"):
        await backend.start(plan_of("pass"))


async def test_a_killed_supervisor_takes_its_process_and_orphans_along_and_the_end_is_told(backend: Backend) -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
    worker = await backend.start(plan_of(f"{daemon}    print(os.getpid(), flush=True)\ntime.sleep(600)"))
    orphan = await process_of(worker)
    (supervisor,) = backend.agent_process().children()
    supervisor.kill()
    assert await end_of(worker) == -signal.SIGKILL
    assert not runs(orphan)


class Proxy:
    """Relays TCP connections to the launcher; cuts most of them in the handshake or amid what comes."""

    CUT_AFTER_BYTES = (4000, 300, 12_000, 2500, 30_000)
    """So much of the agent's goes through, one connection after the other."""

    def __init__(self) -> None:
        self.cuts = self._seen = 0
        self.target: tuple[str, int] = ("", 0)
        self.relays: set[asyncio.StreamWriter] = set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self.target)
        self.relays |= {writer, there[1]}
        limit = self.CUT_AFTER_BYTES[self._seen % len(self.CUT_AFTER_BYTES)]
        self._seen += 1

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, left: int) -> None:
            with contextlib.suppress(OSError):
                while piece := await source.read(1 << 16):
                    left -= len(piece)
                    if left < 0:
                        self.cuts += 1
                        break
                    target.write(piece)
                    await target.drain()
            writer.transport.abort()
            there[1].transport.abort()

        with contextlib.suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(pump(reader, there[1], limit), pump(there[0], writer, 1 << 30))

    def cut(self) -> None:
        """Cut all connections."""
        for relay in self.relays:
            relay.transport.abort()
        self.cuts += 1


class Proxied(Backend):
    """Its agents reach it through a proxy alone, and nobody reads what they print: `ssh` may have ended."""

    shell = ("sh", "-c", '"$@" | true', "sh")

    before = "from asyncrl.hosts import agent; agent.LOOK_S = 0.05; "

    async def listen(self) -> None:
        """Listen behind the proxy."""
        await super().listen()
        parts = urlsplit(self.url)
        self.proxy = Proxy()
        self.proxy.target = (str(parts.hostname), int(parts.port or 0))
        self.relaying = await asyncio.start_server(self.proxy.relay, "127.0.0.1")
        self.url = f"https://127.0.0.1:{self.relaying.sockets[0].getsockname()[1]}"


async def test_a_process_goes_on_over_cuts_with_all_of_its_output_and_its_own_exit_code(run_dir: Path) -> None:
    backend = Proxied(run_dir)
    count = f"import time\nfor i in range({LINES}): print(i, flush=True); time.sleep(0.001)\nraise SystemExit(7)"
    worker = await backend.start(plan_of(count))
    assert await end_of(worker) == 7
    assert [int(line) for line in worker.log.read_text().splitlines()] == list(range(LINES))
    cuts, waiting = backend.proxy.cuts, await backend.start(plan_of(WAITS))
    process = await process_of(waiting)
    backend.proxy.cut()
    waiting.terminate()
    assert await end_of(waiting) == 7
    assert not runs(process)
    assert cuts > 3
    backend.relaying.close()
    await backend.close()


async def test_the_end_of_ssh_alone_is_not_that_of_the_processes(run_dir: Path) -> None:
    """It ends with 255 where its connection is cut."""
    backend = Backend(run_dir)
    script = (
        'read -r order; { printf "%s\\n" "$order" | setsid "$@" & } ; while ! [ -e cut ]; do sleep 0.05; done; exit 255'
    )
    backend.shell = ("sh", "-c", script.replace("cut", str(run_dir / "cut")), "sh")
    worker = await backend.start(plan_of(WAITS))
    await printed_by(worker)
    (run_dir / "cut").touch()
    (each,) = backend._agents.values()
    assert each.carrier is not None
    assert await each.carrier.wait() == 255
    worker.terminate()
    assert await end_of(worker) == 7
    later = await backend.start(plan_of("exit(5)"))
    assert await end_of(later) == 5
    await backend.close()


async def test_a_dead_agents_processes_are_lost_and_the_next_start_has_another(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_backend, "BACK_S", 1.0)
    worker = await backend.start(plan_of(WAITS))
    process = await process_of(worker)
    backend.agent_process().kill()
    assert await end_of(worker) == 255
    assert worker.last_lines()[-1] == "lost with host box2: what carried its agent has ended with -9"
    await await_that(lambda: not runs(process))
    assert await end_of(await backend.start(plan_of("exit(5)"))) == 5


@pytest.mark.parametrize(("code", "end"), [(101, 1), (255, 255), (1, 255), (127, 255)])
async def test_a_host_where_no_agent_starts_says_why(run_dir: Path, code: int, end: int) -> None:
    backend = Backend(run_dir)
    backend.shell = ("sh", "-c", f"echo no route to it; exit {code}")
    worker = await backend.start(plan_of("pass"))
    assert await end_of(worker) == end
    assert worker.last_lines() == [
        "no route to it",
        f"lost with host box2: what carried its agent has ended with {code}",
    ]
    await backend.close()


async def test_a_silent_agent_is_lost_and_told_to_end_when_it_is_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_backend, "GONE_S", 3.0)
    backend = Backend(run_dir)
    backend.before = "from asyncrl.hosts import agent; agent.HOLD_S = 0.2; "
    worker, beside = await backend.start(plan_of(WAITS)), await backend.start(plan_of(WAITS, "box3"))
    process, other = await process_of(worker), await process_of(beside)
    there = psutil.Process(backend._agents["box2"].carrier.pid)  # type: ignore[union-attr]
    there.suspend()
    assert await end_of(worker) == 255
    assert worker.last_lines()[-1] == "lost with host box2: its agent was silent for 3 s"
    assert runs(other)
    successor = await backend.start(worker.plan)  # the earlier one still runs, in the same place
    *_, pid = await printed_by(successor, 5)
    assert f"pid {process.pid} was given up, and still ran: killed" in successor.log.read_text()
    assert not runs(process)
    there.resume()
    await await_that(lambda: not runs(there))
    assert runs(psutil.Process(int(pid)))
    assert runs(other)
    await backend.close()
    assert not runs(other)


SCRIPT = """
import asyncio, sys
from pathlib import Path
from urllib.parse import urlsplit
from asyncrl.runtime.plan import WorkerPlan
from tests.unit.hosts.test_host_agents import WAITS, Backend, plan_of, printed_by

WorkerPlan.command = lambda *_: [sys.executable, "-c", WAITS]

async def main():
    backend = Backend(Path(sys.argv[1]))
    backend.before = sys.argv[2]
    worker = await backend.start(plan_of("toy"))
    print((await printed_by(worker))[0], backend.agent_process().pid, flush=True)
    await worker.wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_processes_end_with_a_killed_launcher_at_once_and_with_a_silent_one_in_time(
    run_dir: Path, sign: signal.Signals
) -> None:
    short = "from asyncrl.hosts import agent; agent.PAUSE_S = 2.0; "
    before = short if sign == signal.SIGSTOP else ""
    with subprocess.Popen(  # noqa: ASYNC220 - a fork
        [sys.executable, "-c", SCRIPT, str(run_dir), before], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            line = await asyncio.to_thread(launcher.stdout.readline)
            processes = [psutil.Process(int(pid)) for pid in line.split()]
            began = time.monotonic()
            launcher.send_signal(sign)
            await await_that(lambda: not any(map(runs, processes)))
            assert time.monotonic() - began < 60.0
        finally:
            launcher.kill()


async def test_closing_leaves_nothing_not_even_a_command_that_waits_for_its_host(run_dir: Path) -> None:
    backend = Backend(run_dir)
    process = await process_of(await backend.start(plan_of(WAITS)))
    there = backend.agent_process()
    await backend.close()
    assert not runs(process)
    assert not runs(there)
    waits = Backend(run_dir)
    waits.shell = ("sh", "-c", "exec sleep 600", "sh")
    worker = await waits.start(plan_of(WAITS))
    worker.terminate()
    began = time.monotonic()
    await waits.close()
    assert time.monotonic() - began < 15.0


async def test_who_has_not_the_runs_token_or_certificate_is_told_nothing(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "kill_descendants", lambda *_, **__: None)  # of the test's own process
    await printed_by(await backend.start(plan_of(WAITS)))
    (each,) = backend._agents.values()
    other = RunSecret.create(tmp_path / "other").http()
    own = backend._secret
    http = JsonHttp(HttpSecurity(other.token, own.file, own.certificate))
    call = Call("box2", each.incarnation, 0.0, Parcel(0, 0, []))
    with pytest.raises(HttpRefused, match="401"):
        await http.call("POST", f"{backend.url}/agent", call, timeout_s=LIMIT_S)
    await http.close()
    member = JsonHttp(own)  # what has the token may still be wrong
    for wrong, status in (({"host": 1}, 400), (Call("box2", 99, 0.0, Parcel(0, 0, [])), 503)):
        with pytest.raises(HttpRefused, match=str(status)):
            await member.call("POST", f"{backend.url}/agent", wrong, timeout_s=LIMIT_S)
    await member.close()
    forged = Order(backend.url, "box2", 0, own.token, other.certificate)
    async with asyncio.timeout(LIMIT_S):
        why = await Agent(forged).serve()
    assert why.startswith("another program listens at the launcher's address")


@pytest.fixture
def placed() -> Iterator[Callable[[str], psutil.Process]]:
    """Start a process whose environment names a place."""
    started = []

    def start(slot: str) -> psutil.Process:
        environment = os.environ | {SLOT_VARIABLE: slot}
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment))
        os.kill(started[-1].pid, signal.SIGSTOP)
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)


def start_of(folder: Path, files: dict[str, str]) -> Start:
    return Start(1, [], [], str(folder), files, None)


def test_what_was_given_up_on_this_host_is_killed_and_a_start_that_comes_late_is_refused(
    tmp_path: Path, placed: Callable[[str], psutil.Process]
) -> None:
    slot = f"model_worker/1 {tmp_path}"
    earlier, beside = placed(f"7 {slot}"), placed(f"8 {slot}0")
    reported: list[str] = []
    agent._take_slot(f"10 {slot}", start_of(tmp_path, {}), reported.append)
    assert reported == [f"pid {earlier.pid} was given up, and still ran: killed"]
    assert not runs(earlier)
    assert runs(beside)
    later, folder = placed(f"11 {slot}"), tmp_path / "run"
    with pytest.raises(Refused, match="a later process has its slot by now"):
        agent._take_slot(f"10 {slot}", start_of(folder, {"secret": "of then"}), reported.append)
    assert not folder.exists(), "the files of its successor are there by now"
    assert runs(later)


def test_on_a_host_with_a_disk_of_its_own_the_files_come_first_and_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "runs" / "mine"
    for number in range(2):  # of a run that is continued, with another secret
        agent._take_slot("", start_of(folder, {"secret": f"s{number}", "config.yaml": "c: 1"}), print)
        assert (folder / "secret").read_text() == f"s{number}"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "secret"]
    modes = [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "secret")]
    assert modes == [0o700, 0o700, 0o600]


def test_nothing_is_put_into_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Refused, match="that only they can write to"):
        agent._take_slot("", start_of(folder, {"secret": "s"}), print)
    assert list(folder.iterdir()) == []


def test_a_process_sees_its_share_of_the_gpus_that_the_cluster_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    dealt = Start(1, [], [b"A=b=c"], "", {}, [1, 2])
    assert {"A": "b=c", "CUDA_VISIBLE_DEVICES": "GPU-5,7"}.items() <= agent._environment(dealt).items()
    named = Start(1, [], [b"CUDA_VISIBLE_DEVICES=0"], "", {}, None)
    assert agent._environment(named)["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert agent._environment(dealt)["CUDA_VISIBLE_DEVICES"] == "1,2"  # all that are there are the agent's
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(Refused, match=r"the cluster gave this host the GPUs \['3'\], and the process needs numbers"):
        agent._environment(dealt)


async def test_a_later_launchs_processes_have_higher_numbers_though_its_host_has_another_clock(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent kills the earlier process of a place, and refuses a start that comes after a later one."""
    config = read_run_config(run_dir)
    config.fileroot = str(run_dir / "root")
    numbers = []
    for now in (1 << 61, 1 << 60):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        claim = TrialClaim.take(config)
        write_run_config(config, run_dir_of(config))
        here = Backend(run_dir_of(config))
        numbers += [next(here._starts) for _ in range(2)]
        await here.close()
        claim.release()
    assert numbers == sorted(set(numbers))


def test_what_describes_this_hosts_installation_stays_here(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PATH does; libraries and interpreters of this host may be missing there, or fit nothing there."""
    here = {"LD_LIBRARY_PATH": "/opt/here", "VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda", "ASYNCRL_HOST": "1.2.3.4"}
    for name, value in {**here, "MY_KEY": "1", "PYTHONPATH": "/mine"}.items():
        monkeypatch.setenv(name, value)
    plan = plan_of("")
    carried = Backend(run_dir).order_of(plan, 17).environment
    assert not [entry for entry in carried if os.fsdecode(entry).partition("=")[0] in here]
    assert {b"MY_KEY=1", b"PYTHONPATH=/mine", os.fsencode(f"ASYNCRL_SLOT=17 {plan.name} {run_dir}")} <= set(carried)


def test_a_node_of_slurm_is_one_step_with_its_gpus_and_outside_of_an_allocation_a_job_with_its_cores(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SlurmBackend(run_dir)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    step, without = (backend.carrier(HostConfig(name="n1", gpus=gpus), ["x"]) for gpus in (["0", "1"], []))
    assert {"--nodelist=n1", "--ntasks=1", "--overlap", "--gres=gpu:2", "--input=0"} <= set(step)
    assert (step[0], step[-2:]) == ("srun", ["--", "x"])
    assert "--gres=none" in without
    assert not [word for word in step if word.startswith("--cpus")]
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "--cpus-per-task=7" in backend.carrier(HostConfig(name="n1", cpus=7), ["x"])


@pytest.fixture
def start_pod(run_dir: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "asyncrl.hosts.agent", str(run_dir), "box2"]
        environment = os.environ | {"ASYNCRL_HOST": "127.0.0.2"}
        started.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)


async def test_a_pods_program_serves_one_launch_after_the_other_and_processes_of_an_earlier_program_are_lost(
    run_dir: Path, start_pod: Callable[[], subprocess.Popen[bytes]]
) -> None:
    for launch in range(2):
        (run_dir / "secret").unlink()
        RunSecret.create(run_dir / "secret")
        backend = PodBackend(run_dir)
        if not launch:
            first = start_pod()
        where = plan_of("import os; print(os.environ['ASYNCRL_HOST']); exit(3)")
        worker = await backend.start(where)
        assert (await end_of(worker), worker.last_lines()) == (3, ["127.0.0.2"])
        if launch:
            waiting = await backend.start(plan_of(WAITS))
            process = await process_of(waiting)
            first.kill()
            second = start_pod()
            assert await end_of(waiting) == 255
            assert waiting.last_lines()[-1] == "lost with host box2: the program there was started again"
            await await_that(lambda gone=process: not runs(gone))  # type: ignore[misc]
            last = await backend.start(plan_of(WAITS))
            process = await process_of(last)
            second.terminate()
            assert await end_of(last) == 255
            assert last.last_lines()[-1] == "lost with host box2: it was asked to end"
            assert not runs(process)
            assert await asyncio.to_thread(second.wait, LIMIT_S) == 1  # with 0 its Job would be complete
        await backend.close()


async def test_a_host_without_a_pod_is_lost_after_the_limit(run_dir: Path) -> None:
    backend = PodBackend(run_dir)
    backend.config.system.start_timeout_s = 1.0
    worker = await backend.start(plan_of("pass"))
    assert await end_of(worker) == 255
    assert worker.last_lines()[-1] == "lost with host box2: its agent was silent for 1 s"
    await backend.close()


class Detaching(Backend):
    """Starts agents as an actor of Ray does: they are nobody's children, and it holds their standard input."""

    detaches = True

    async def start_agent(self, host: HostConfig, order: bytes, log: object) -> None:
        """See the base class."""
        command = self.carrier(host, agent_backend.agent_command(""))
        self.held = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: ASYNC220 - a fork
        assert self.held.stdin is not None
        self.held.stdin.write(order)
        self.held.stdin.flush()
        assert await asyncio.to_thread(self.held.wait, LIMIT_S) == 0


async def test_a_detached_agent_is_nobodys_child_and_ends_with_its_standard_input(run_dir: Path) -> None:
    backend = Detaching(run_dir)
    worker = await backend.start(plan_of(WAITS))
    process = await process_of(worker)
    assert os.getpid() not in [parent.pid for parent in process.parents()]
    assert backend.held.stdin is not None
    backend.held.stdin.close()
    assert await end_of(worker) == 255
    assert not runs(process)
    await backend.close()


def test_a_launcher_whose_host_runs_nothing_is_reached_on_the_way_to_the_others() -> None:
    config = ExperimentConfig()
    config.system.hosts = [HostConfig(name="box2", address="127.0.0.2")]
    assert agent_backend._own_address(config).startswith("127.")


def test_processes_of_a_host_that_start_at_once_write_the_same_files(tmp_path: Path) -> None:
    files = {"secret": "a" * 64, "config.yaml": "b" * 100_000}
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(agent.put_files, str(tmp_path), files) for _ in range(200)]:
            done.result()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
