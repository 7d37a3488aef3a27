"""Users' code off the event loop: where it runs, its limits, and what its failures cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.api import RunIn
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code_pool.call_records import (
    Activity,
    Code,
    Meter,
    UserCodeError,
    current_meter,
    failed_label,
    metered,
    timed,
)
from asyncrl.rollout.user_code_pool.child import MAX_BYTES, ChildCall, CodeTarget, packed
from asyncrl.rollout.user_code_pool.process_pool import PoolProcess, ProcessLimits, ProcessPool, excess
from asyncrl.rollout.user_code_pool.runner import REPEAT_S, RunningCalls, UserCodeRunner
from asyncrl.rollout.user_code_pool.threads import MAX_ABANDONED
from asyncrl.runtime.supervisor import Usage, usage

LIMIT_S = 300.0
"""Of what is not to come to its limit."""
HOSTILE = """
import os
import subprocess
import sys
import time


def fine(data, completion, *, scale=1.0):
    return len(completion) * scale


def environment(data, completion):
    return [os.environ.get("PYTHONPATH"), [path for path in sys.path if path]]


def pid(data, completion):
    return os.getpid()


def loops(data, completion):
    while True:
        pass


def exits(data, completion):
    os._exit(3)


def exits_before_its_children(data, completion, *, folder):
    children = []
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            os.setsid()
            time.sleep(600)
    with open(folder + "/children", "w") as told:
        told.write(" ".join(map(str, children)))
    os._exit(3)


def exits_before_a_program(data, completion, *, folder):
    program = subprocess.Popen(
        ["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    with open(folder + "/program", "w") as told:
        told.write(str(program.pid))
    os._exit(3)


def writes_into_the_pipe(data, completion):
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, b"\\xff" * 4)
        except OSError:
            pass
    time.sleep(600)


def crashes(data, completion):
    print("about to crash")
    sys.stdout.flush()
    os.kill(os.getpid(), 11)


def ends_by_a_real_time_signal(data, completion):
    os.kill(os.getpid(), 40)


def wants_10_gb(data, completion):
    return len(bytearray(10 << 30))


def prints_100_mb(data, completion):
    sys.stdout.write("x" * 100_000_000)
    return 1.0


def returns_100_mb(data, completion):
    return "x" * 100_000_000


def leaves_children(data, completion):
    children = []
    for _ in range(5):
        children.append(os.fork())
        if children[-1] == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
    return children


def forks_without_end(data, completion):
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    time.sleep(600)


def forks_and_both_return(data, completion):
    os.fork()
    return 3.0


def leaves_with_exit(data, completion):
    sys.exit("enough")


class Unprintable(Exception):
    def __init__(self, a, b):
        pass

    def __str__(self):
        raise ValueError


def raises_what_cannot_be_sent(data, completion):
    raise Unprintable(1, 2)


def returns_what_cannot_be_sent(data, completion):
    return lambda: 1


def waits(data, completion, *, folder):
    open(folder + "/begun", "w").close()
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    return 7.0
"""


@pytest.fixture
async def runner() -> AsyncIterator[UserCodeRunner]:
    settings = UserCodeConfig(
        threads=8, processes=1, process_memory_mb=1024, process_children=8, process_max_calls=4, slow_call_s=0.2
    )
    async with UserCodeRunner(settings) as made:
        yield made


@pytest.fixture
def hostile(tmp_path: Path) -> Callable[..., Code]:
    """`hostile(name)`: the code of that function above, in a process."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)

    def code(name: str, timeout_s: float = LIMIT_S, **args: Any) -> Code:
        target = CodeTarget(f"{file}:{name}", args)
        return Code(f"reward hostile.py:{name}", Activity.reward, timeout_s, RunIn.process, target)

    return code


def in_thread(timeout_s: float = LIMIT_S, label: str = "reward my.py:score") -> Code:
    return Code(label, Activity.reward, timeout_s, RunIn.thread)


async def ask(runner: UserCodeRunner, code: Code, completion: str = "12345") -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await runner.call(code, print, {"prompt": "p"}, completion)


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """The children that are not of `before`, once there is one."""
    while not (started := set(psutil.Process().children(recursive=True)) - before):
        pass
    return started


async def test_output_that_the_full_disk_refuses_does_not_block_the_process_that_prints_it() -> None:
    printing = "import sys; sys.stderr.write('x' * (1 << 20)); sys.stderr.flush()"
    made = await asyncio.create_subprocess_exec(sys.executable, "-c", printing, stderr=subprocess.PIPE)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = PoolProcess(ProcessPool(1, ProcessLimits(1 << 30, 4, 9)), made)
        async with asyncio.timeout(LIMIT_S):
            await process.drain_prints(full)
            assert await made.wait() == 0
        assert process.printed == 1 << 20
    finally:
        os.close(full)
        with contextlib.suppress(ProcessLookupError):
            made.kill()


async def test_a_process_imports_from_where_the_worker_does_and_passes_that_on_to_no_other_python(
    runner: UserCodeRunner, hostile: Callable[..., Code], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's site-packages as PYTHONPATH would break any other Python that the code runs."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert await ask(runner, hostile("environment")) == ["/mine", sys.path]


def test_the_use_of_a_process_is_measured_without_a_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + LIMIT_S
        while usage(process.pid).processes < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        whole = psutil.Process(process.pid)
        (below,) = whole.children()
        listed: list[str] = []
        listdir = os.listdir
        monkeypatch.setattr(os, "listdir", lambda folder: [listed.append(folder), listdir(folder)][1])
        used = usage(process.pid)
        assert sorted(listed) == sorted(f"/proc/{pid}/task" for pid in (process.pid, below.pid))
        resident = whole.memory_info().rss + below.memory_info().rss
        assert used.resident_bytes == pytest.approx(resident, rel=0.2)


async def test_a_function_in_a_process_is_called_with_its_arguments_and_the_process_is_renewed(
    runner: UserCodeRunner, hostile: Callable[..., Code]
) -> None:
    assert await ask(runner, hostile("fine", scale=2.0)) == 10.0
    pids = [await ask(runner, hostile("pid")) for _ in range(4)]
    assert pids[0] == pids[1] == pids[2]
    assert pids[3] != pids[0], "process_max_calls=4"
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loops", "did not return within 0.5 s; its process was killed"),
        ("exits", r"lost its process: it ended \(exit code 3\)"),
        ("crashes", r"killed by SIGSEGV\); it last printed: about to crash"),
        ("ends_by_a_real_time_signal", r"lost its process: it ended \(killed by signal 40\)"),
        ("writes_into_the_pipe", r"lost its process: it announced a reply of 4294967295 bytes \(killed by SIGKILL\)"),
        ("wants_10_gb", "raised MemoryError"),
        ("returns_100_mb", f"bytes, more than the {MAX_BYTES}"),
        (
            "forks_without_end",
            r"started \d+ processes \(rollout.user_code.process_children=8\); its process was killed",
        ),
        ("leaves_with_exit", "raised SystemExit: enough"),
        ("raises_what_cannot_be_sent", "raised Unprintable"),
        ("returns_what_cannot_be_sent", "what it returned cannot travel"),
    ],
)
async def test_a_hostile_function_costs_its_call_and_the_next_one_is_answered(
    runner: UserCodeRunner, hostile: Callable[..., Code], name: str, message: str
) -> None:
    code = hostile(name, timeout_s=0.5 if name == "loops" else LIMIT_S)
    with pytest.raises(UserCodeError, match=message) as caught:
        await ask(runner, code)
    assert failed_label(caught.value) == f"reward hostile.py:{name}"
    assert await ask(runner, hostile("fine")) == 5.0


@pytest.mark.parametrize("in_process", [True, False], ids=["process", "thread"])
async def test_time_in_which_the_worker_was_stopped_is_not_that_of_users_code(
    runner: UserCodeRunner, hostile: Callable[..., Code], tmp_path: Path, in_process: bool
) -> None:
    def waits() -> float:
        (tmp_path / "begun").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return 7.0

    code = hostile("waits", timeout_s=2.0, folder=str(tmp_path)) if in_process else in_thread(timeout_s=2.0)
    calling = asyncio.create_task(runner.call(code, *((print, {}, "") if in_process else (waits,))))
    while not (tmp_path / "begun").exists():  # noqa: ASYNC110  # it may be in another process
        await asyncio.sleep(0.01)
    (tmp_path / "go").touch()
    time.sleep(3.0)  # noqa: ASYNC251  # the worker is stopped, for longer than the limit
    assert await calling == 7.0


async def test_what_a_function_prints_or_forks_does_not_disturb_its_answer(
    runner: UserCodeRunner, hostile: Callable[..., Code]
) -> None:
    assert await ask(runner, hostile("prints_100_mb")) == 1.0
    assert await ask(runner, hostile("forks_and_both_return")) == 3.0
    children = await ask(runner, hostile("leaves_children"))
    assert len(children) == 5
    assert await ask(runner, hostile("fine")) == 5.0
    async with asyncio.timeout(LIMIT_S):  # what it left behind is killed with its process, in sessions of its own too
        while any(map(runs, children)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_a_process_started_ends_with_it_also_if_it_ends_by_itself(
    runner: UserCodeRunner, hostile: Callable[..., Code], tmp_path: Path
) -> None:
    """Its children hold its pipes."""
    with pytest.raises(UserCodeError, match=r"lost its process: it ended \(exit code 3\)"):
        await ask(runner, hostile("exits_before_its_children", folder=str(tmp_path)))
    children = list(map(int, (tmp_path / "children").read_text().split()))
    assert len(children) == 2
    assert not any(map(runs, children))


def test_a_program_that_holds_the_standard_error_of_a_process_that_ended_ends_too(tmp_path: Path) -> None:
    """On asyncio's own loop the wait for a process ends only with its pipes, so that it always outlasts its limit; on
    uvloop it does where the worker is slow.
    """
    (tmp_path / "hostile.py").write_text(HOSTILE)
    target = CodeTarget(f"{tmp_path / 'hostile.py'}:exits_before_a_program", {"folder": str(tmp_path)})

    async def call() -> None:
        pool = ProcessPool(1, ProcessLimits(memory_bytes=1 << 30, processes=8, max_calls=4))
        with pytest.raises(UserCodeError, match="lost its process"):
            await pool.call("reward hostile.py", target, "", [{}, "x"], LIMIT_S)
        await pool.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(call())
    assert not runs(int((tmp_path / "program").read_text()))


async def test_a_process_that_has_programs_left_is_not_used_again(
    runner: UserCodeRunner, hostile: Callable[..., Code]
) -> None:
    first = await ask(runner, hostile("pid"))
    children = await ask(runner, hostile("leaves_children"))
    assert await ask(runner, hostile("pid")) != first
    assert not any(map(runs, children))


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


async def test_a_call_that_is_given_up_ends_its_process(runner: UserCodeRunner, hostile: Callable[..., Code]) -> None:
    before = set(psutil.Process().children(recursive=True))
    call = asyncio.create_task(ask(runner, hostile("loops")))
    started = await asyncio.to_thread(started_since, before)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert psutil.wait_procs(list(started), timeout=LIMIT_S)[1] == []


async def test_arguments_that_are_no_plain_data_are_an_error_that_says_so(
    runner: UserCodeRunner, hostile: Callable[..., Code]
) -> None:
    with pytest.raises(UserCodeError, match=r"was given what cannot travel .*thread.lock"):
        await runner.call(hostile("fine"), print, {"prompt": threading.Lock()}, "text")
    with pytest.raises(UserCodeError, match="surrogates not allowed"):
        await runner.call(hostile("fine"), print, {"prompt": "\ud800"}, "text")


async def test_a_plain_function_runs_in_a_thread_and_its_exception_is_told_under_its_name(
    runner: UserCodeRunner,
) -> None:
    assert await runner.call(in_thread(), threading.get_ident) != threading.get_ident()
    with pytest.raises(UserCodeError, match=r"reward my.py:score raised KeyError: 'answer'") as caught:
        await runner.call(in_thread(), lambda: {}["answer"])
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_failure_within_asynchronous_code_keeps_its_cause(runner: UserCodeRunner) -> None:
    async def step() -> Any:
        return await runner.call(in_thread(), lambda: {}["answer"])

    with pytest.raises(UserCodeError, match=r"reward my.py:score raised KeyError: 'answer'") as caught:
        await runner.call(Code("env my.py:Env.step", Activity.env, LIMIT_S, RunIn.auto), step)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError])
async def test_what_no_event_loop_can_carry_is_an_ordinary_failure(
    runner: UserCodeRunner, raised: type[BaseException]
) -> None:
    def leave() -> None:
        raise raised

    async def leave_later() -> None:
        raise raised

    with pytest.raises(UserCodeError, match=f"raised {raised.__name__}"):
        await runner.call(in_thread(), leave)
    if raised in (SystemExit, KeyboardInterrupt):
        with pytest.raises(UserCodeError, match=f"raised {raised.__name__}"):
            await runner.call(Code("agent", Activity.env, LIMIT_S, RunIn.auto), leave_later)


async def test_a_thread_that_does_not_return_is_abandoned_and_counted_until_it_does(runner: UserCodeRunner) -> None:
    release = threading.Event()
    for _ in range(MAX_ABANDONED):
        with pytest.raises(UserCodeError, match=r"did not return within 0.001 s; its thread continues") as caught:
            await runner.call(in_thread(0.001), release.wait)
        assert caught.value.still_runs
    with pytest.raises(UserCodeError, match=f"is not called: {MAX_ABANDONED} calls of it never returned"):
        await runner.call(in_thread(), time.monotonic)
    assert await runner.call(in_thread(label="reward other.py:score"), lambda: 7) == 7
    release.set()
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await runner.call(in_thread(), lambda: 8) == 8
                break
            except UserCodeError:
                await asyncio.sleep(0.01)


async def test_at_most_so_many_plain_functions_run_at_a_time_and_the_loop_stays_free(runner: UserCodeRunner) -> None:
    running = most = turns = 0
    lock, all_eight = threading.Lock(), threading.Barrier(8)

    def wait_for_a_turn() -> None:
        """Wait for two turns of the event loop, while this and seven more calls are in threads."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_eight.wait(LIMIT_S)
        before = turns
        while turns < before + 2:
            time.sleep(0.001)
        with lock:
            running -= 1

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(runner.call(in_thread(), wait_for_a_turn) for _ in range(32)))
    counting.cancel()
    assert most == 8, "threads=8"


async def test_asynchronous_code_runs_on_a_loop_of_its_own_which_it_may_block(runner: UserCodeRunner) -> None:
    home, code = asyncio.get_running_loop(), Code("env my.py:Env.step", Activity.env, 1.0, RunIn.auto)
    blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        assert asyncio.get_running_loop() is not home
        blocked.set()
        release.wait(LIMIT_S)

    call = asyncio.create_task(runner.call(code, block))
    await asyncio.sleep(0)
    assert blocked.wait(LIMIT_S), "it has begun; this loop, which minds the limit, stands still until then"
    with pytest.raises(UserCodeError, match=r"env my.py:Env.step did not return within 1 s"):
        await call
    assert not release.is_set()
    release.set()

    async def answer() -> int:
        return 3

    assert await runner.call(Code("env", Activity.env, LIMIT_S, RunIn.auto), answer) == 3


async def test_a_thread_may_call_what_runs_in_a_process_or_on_a_loop(
    runner: UserCodeRunner, hostile: Callable[..., Code]
) -> None:
    async def answer() -> int:
        return 4

    def both() -> tuple[Any, ...]:
        own = Code("reward", Activity.reward, LIMIT_S, RunIn.auto)
        in_process = runner.call_blocking(hostile("fine"), print, {}, "123")
        thread = runner.call_blocking(in_thread(), threading.get_ident)
        return in_process, runner.call_blocking(own, answer), thread == threading.get_ident()

    assert await runner.call(in_thread(), both) == (3.0, 4, True)


async def test_slow_calls_are_named_and_times_are_the_rollouts_wherever_its_parts_run(
    runner: UserCodeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def in_users_loop() -> None:
        await runner.call(in_thread(), time.sleep, 0.25)

    with metered() as meter:
        await runner.call(Code("env my.py:Env.step", Activity.env, LIMIT_S, RunIn.auto), in_users_loop)
        await runner.call(in_thread(), lambda: current_meter().rewards["right"].append(0.5))
    metrics = meter.metrics()
    assert metrics["rollout/reward_s"] >= 0.25
    assert metrics["rollout/env_s"] >= 0.25
    assert metrics["reward/right"] == 0.5
    assert any(message.startswith("reward my.py:score took ") for message in caplog.messages)


async def test_a_wait_for_a_free_thread_is_no_time_of_the_call() -> None:
    """The second call waits for the thread while the first runs, and is not called slow for it."""
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def blocks() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(LIMIT_S)

    async with UserCodeRunner(UserCodeConfig(threads=1)) as runner:
        first = asyncio.create_task(runner.call(in_thread(), blocks))
        async with asyncio.timeout(LIMIT_S):
            await begun.wait()
        with metered() as meter:
            second = asyncio.create_task(runner.call(in_thread(), int))
            await asyncio.sleep(0)
        freed = time.monotonic()
        go.set()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(first, second)
    (waited,), (ran,) = meter.intervals[Activity.thread_wait], meter.intervals[Activity.reward]
    assert waited[0] <= freed <= waited[1] <= ran[0]


async def test_a_call_runs_from_when_a_process_is_free(
    runner: UserCodeRunner, hostile: Callable[..., Code], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward of 3 s is not said to have taken the 42 s in which it waited for its turn."""
    seen: list[str] = []
    track = RunningCalls.track

    @contextlib.contextmanager
    def noted(self: RunningCalls, label: str, activity: Activity) -> Iterator[None]:
        seen.append(f"{label} begins")
        with track(self, label, activity):
            yield
        seen.append(f"{label} ends")

    monkeypatch.setattr(RunningCalls, "track", noted)
    with metered() as meter:
        first = asyncio.create_task(ask(runner, hostile("waits", folder=str(tmp_path))))
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110  # it is another process
            await asyncio.sleep(0.01)
        second = asyncio.create_task(ask(runner, hostile("fine")))
        for _ in range(10):
            await asyncio.sleep(0)
        (tmp_path / "go").touch()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(first, second)
    waits, fine = "reward hostile.py:waits", "reward hostile.py:fine"
    assert seen == [f"{waits} begins", f"{waits} ends", f"{fine} begins", f"{fine} ends"]
    assert {"rollout/reward_s", "rollout/process_wait_s"} <= meter.metrics().keys()


async def test_what_holds_the_loops_is_named(
    runner: UserCodeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rollout.user_code_pool.runner.LOOK_S", 0.05)

    async def sleeps_synchronously() -> None:
        """It comes round now and then: what held the loop before this, a thread that begins late, was told then."""
        while not any(expected in message and where in message for message in caplog.messages):
            time.sleep(0.3)  # noqa: ASYNC251
            await asyncio.sleep(0.01)

    expected, where = "held its event loop", "in sleeps_synchronously"

    async with UserCodeRunner(UserCodeConfig()) as watched:
        await watched.call(Code("env my.py:Env.step", Activity.env, LIMIT_S, RunIn.auto), sleeps_synchronously)
        # From here on: a busy machine holds up this loop for as long, and then it is not the users' that is blamed.
        monkeypatch.setattr("asyncrl.rollout.user_code_pool.runner.HELD_S", 0.1)
        holding = Code("reward my.py:holds", Activity.reward, LIMIT_S, RunIn.loop)
        await watched.call(holding, time.sleep, 0.2)
        assert any(message.startswith("reward my.py:holds held an event loop for ") for message in caplog.messages)
        seen = threading.Event()
        slow = asyncio.create_task(watched.call(in_thread(label="reward my.py:holds"), seen.wait, LIMIT_S))
        while not any("these ran: reward my.py:holds" in message for message in caplog.messages):
            assert not slow.done(), caplog.messages
            await asyncio.sleep(0.02)  # the watch begins to wait
            time.sleep(0.3)  # noqa: ASYNC251
        seen.set()
        assert await slow


def test_a_process_is_killed_beyond_its_limits() -> None:
    limits = ProcessLimits(memory_bytes=100 << 20, processes=3, max_calls=10)
    assert excess(limits, Usage(3, 100 << 20)) is None
    assert "started 3 processes" in (excess(limits, Usage(4, 0)) or "")
    assert "used 101 MB" in (excess(limits, Usage(1, 101 << 20)) or "")


def test_a_slow_code_is_named_once_in_a_while_with_how_often_it_was() -> None:
    slow = RunningCalls(5.0)
    assert slow.slow_line("reward a", 4.9, 0.0) is None
    assert slow.slow_line("reward a", 31.0, 1.0) == "reward a took 31 s"
    assert slow.slow_line("reward a", 31.0, 2.0) is None
    assert slow.slow_line("reward b", 6.0, 2.0) == "reward b took 6 s"
    assert slow.slow_line("reward a", 7.25, 1.0 + REPEAT_S) == (
        "reward a took 7.25 s, and 1 more of its calls were slow since the last such line"
    )


def test_a_meter_counts_time_of_calls_at_once_once_and_averages_rewards() -> None:
    meter = Meter()
    for begin, end in ((4.0, 4.5), (1.0, 2.0), (1.5, 2.5), (1.25, 1.75)):
        meter.intervals[Activity.generate].append((begin, end))
    meter.rewards["right"] += [1.0, 0.0]
    meter.failures += 1
    assert meter.metrics() == {"rollout/generate_s": 2.0, "rollout/failed_rewards": 1.0, "reward/right": 0.5}
    with timed(Activity.env):  # outside of a rollout nobody reads it
        pass


def test_the_name_of_failed_code_is_found_through_causes_and_groups() -> None:
    failed = UserCodeError("reward a", "raised ValueError")
    group = ExceptionGroup("several", [KeyError("x"), failed])
    failed.__cause__ = group
    wrapped = RuntimeError("agent")
    wrapped.__cause__ = group
    assert failed_label(wrapped) == "reward a"
    assert failed_label(KeyError("x")) is None


def test_a_message_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=f"more than the {MAX_BYTES}"):
        packed(ChildCall(CodeTarget("a.py:b", {}), "answer", ["x" * MAX_BYTES]))


def test_the_pool_dies_with_its_worker(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(
        "import asyncio, os\n"
        "from asyncrl.rollout.user_code_pool.child import CodeTarget\n"
        "from asyncrl.rollout.user_code_pool.process_pool import ProcessLimits\n"
        "from asyncrl.rollout.user_code_pool.process_pool import ProcessPool\n"
        "async def main():\n"
        "    pool = ProcessPool(1, ProcessLimits(1 << 30, 4, 9))\n"
        f"    target = CodeTarget({str(tmp_path / 'f.py')!r} + ':pid', {{}})\n"
        "    print(await pool.call('r', target, 'answer', [], 60), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    (tmp_path / "f.py").write_text("import os\ndef pid():\n    return os.getpid()\n")
    ended = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    left = [process for process in psutil.process_iter() if process.pid == int(ended.stdout)]
    assert psutil.wait_procs(left, timeout=LIMIT_S)[1] == []
