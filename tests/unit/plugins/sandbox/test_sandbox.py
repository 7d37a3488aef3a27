"""A stranger's program harms nothing, and how it ended is told."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from asyncrl.plugins.sandbox import Limits, Sandbox, SandboxUnavailable

LOOK_AROUND = """
import os, socket

def play_with_retries(name, function):
    try:
        print(name, function())
    except OSError as error:
        print(name, type(error).__name__)

play_with_retries("network", lambda: socket.create_connection(("1.1.1.1", 53), 1))
play_with_retries("own host", lambda: socket.create_connection(("127.0.0.1", 22), 1))
play_with_retries("library", lambda: open(os.path.dirname(os.__file__) + "/written", "w"))
play_with_retries("root", lambda: open("/written", "w"))
play_with_retries("users", lambda: open("/etc/passwd").read())
play_with_retries("others", lambda: [os.kill(pid, 9) for pid in range(3, 10)])
play_with_retries("remount", lambda: os.chroot("/work"))
play_with_retries("own folder", lambda: open("mine.txt", "w").write("1"))
print("environment", sorted(os.environ), sorted(os.listdir("/work")))
"""
FORK_BOMB = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        started += 1
except OSError as error:
    print(started < 16, flush=True)
"""
ESCAPE = """
import os, subprocess, sys, time
marker = sys.argv[1]
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", marker], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
time.sleep(float(sys.argv[2]))
"""
NO_MEMORY_OUTSIDE = """
import ctypes, os, platform, socket

libc = ctypes.CDLL(None, use_errno=True)
column = ("x86_64", "aarch64").index(platform.machine())
for name, numbers, arguments in (
    ("shmget", (29, 194), (0, 1 << 24, 0o1600)),
    ("semget", (64, 190), (0, 32000, 0o1600)),
    ("msgget", (68, 186), (0, 0o1600)),
    ("mq_open", (240, 180), (b"q", 66, 0o600, None)),
    ("vmsplice", (278, 75), (1, None, 0, 0)),
    ("io_setup", (206, 0), (100, ctypes.byref(ctypes.c_ulong()))),
    ("io_uring_setup", (425, 425), (8, ctypes.create_string_buffer(200))),
    ("inotify_init1", (294, 26), (0,)),
    ("add_key", (248, 217), (b"user", b"k", b"v", 1, -2)),
    ("memfd_secret", (447, 447), (0,)),
    ("landlock", (444, 444), (None, 0, 1)),
    ("unshare", (272, 97), (0x10000000,)),
    ("clone", (56, 220), (0x10000011, 0, 0, 0, 0)),
    ("ptrace", (101, 117), (0, 0, 0, 0)),
):
    ctypes.set_errno(0)
    given = libc.syscall(numbers[column], *arguments)
    print(name, given, os.strerror(ctypes.get_errno()))
for name in ("AF_NETLINK", "AF_VSOCK", "AF_ALG"):
    try:
        print(name, socket.socket(getattr(socket, name), socket.SOCK_RAW).close())
    except OSError as error:
        print(name, -1, error.strerror)
try:
    print("SO_SNDBUF", socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24))
except OSError as error:
    print("SO_SNDBUF", -1, error.strerror)
try:
    print("memfd_create", os.memfd_create("x"))
except OSError as error:
    print("memfd_create", -1, error.strerror)
"""
USUAL = """
import asyncio, concurrent.futures, os, sqlite3, subprocess, sys, tempfile, threading

async def main():
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(2)", stdout=subprocess.PIPE)
    return await asyncio.gather(asyncio.to_thread(sum, [1, 2]), reader.communicate())

print(asyncio.run(main()))
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
print(subprocess.check_output(["/bin/sh", "-c", "echo a | cat"]))
with sqlite3.connect("data.db") as data:
    print(data.execute("select 3").fetchall())
print(list(concurrent.futures.ThreadPoolExecutor(2).map(abs, [-1, -2])))
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(Limits(wall_s=120.0, memory_mb=256, work_mb=4, output_bytes=1 << 16))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_it_sees_the_interpreter_and_its_folder_and_nothing_else(sandbox: Sandbox) -> None:
    ended = sandbox.run({"look.py": LOOK_AROUND}, ["look.py"])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "network OSError",
        "own host OSError",
        "library OSError",
        "root OSError",
        "users FileNotFoundError",
        "others ProcessLookupError",
        "remount PermissionError",
        "own folder 1",
        "environment ['HOME', 'LANG', 'PATH'] ['look.py', 'mine.txt']",
    ]


def test_the_umask_of_a_run_does_not_keep_the_program_out(sandbox: Sandbox) -> None:
    """The processes of a run create nothing that others may read; its files are another user's to the program."""
    before = os.umask(0o077)
    try:
        ended = sandbox.run({"a.py": "print('there')"}, ["a.py"])
    finally:
        os.umask(before)
    assert (ended.stdout, ended.stderr) == ("there\n", "")


def test_it_reads_its_input_and_its_arguments(sandbox: Sandbox) -> None:
    program = "import sys\nprint(sys.argv[1:], len(sys.stdin.read()), open('data.txt').read())"
    broken = sandbox.run({"a.py": program, "data.txt": "ü\ud800"}, ["a.py"])
    assert broken.exit_code == 1
    assert "UnicodeDecodeError" in broken.stderr
    ended = sandbox.run({"a.py": program, "data.txt": "ü"}, ["a.py", "x y", "$HOME"], stdin="é" * 100_000)
    assert (ended.exit_code, ended.stdout) == (0, "['x y', '$HOME'] 100000 ü\n")
    ignored = sandbox.run({"a.py": "print(1)"}, ["a.py"], stdin="x" * 1_000_000)
    assert (ignored.exit_code, ignored.stdout) == (0, "1\n")


@pytest.mark.parametrize(
    ("program", "exit_code", "message"),
    [
        ("x = bytearray(10 << 30)", 1, "MemoryError"),
        ("open('big', 'wb').write(b'x' * (100 << 20))", 1, "OSError"),
        ("for i in range(1000): open(str(i), 'wb').write(b'x' * 100_000)", 1, "No space left"),
        ("for i in range(100_000): open(str(i), 'w')", 1, "No space left"),
        ("import os; os._exit(9)", 9, ""),
        ("import os; os.kill(os.getpid(), 11)", 139, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
    ],
)
def test_what_it_wants_too_much_of_it_does_not_get(
    sandbox: Sandbox, program: str, exit_code: int, message: str
) -> None:
    ended = sandbox.run({"a.py": program}, ["a.py"])
    assert message in ended.stderr
    assert (ended.exit_code, ended.stopped) == (exit_code, "")


def test_no_memory_is_to_be_had_outside_the_limits(sandbox: Sandbox) -> None:
    """Files in memory, shared memory, queues, rings, pages in pipes: the limit of address space covers none of them."""
    ended = sandbox.run({"a.py": NO_MEMORY_OUTSIDE}, ["a.py"])
    assert ended.exit_code == 0, ended.stderr
    tried = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    assert len(tried) == 19
    refusals = {"Operation not permitted", "Function not implemented", "Address family not supported by protocol"}
    assert {name: message for name, message in tried.items() if message.removeprefix("-1 ") not in refusals} == {}


def test_what_usual_programs_do_is_allowed(sandbox: Sandbox) -> None:
    ended = sandbox.run({"a.py": USUAL}, ["a.py"])
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["[3, (b'2\\n', None)]", "thread", "b'a\\n'", "[(3,)]", "[1, 2]"]


def test_a_machine_whose_system_calls_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        Sandbox()


def test_a_fork_bomb_is_stopped_at_its_number_and_a_flood_of_output_at_its_size(sandbox: Sandbox) -> None:
    assert sandbox.run({"a.py": FORK_BOMB}, ["a.py"]).stdout == "True\n"
    ended = sandbox.run({"a.py": "print('x' * 100_000_000)"}, ["a.py"])
    assert ended.stopped == "output"
    assert len(ended.stdout) == 1 << 16


@pytest.mark.parametrize(("wall_s", "sleep_s", "stopped"), [(1.0, "600", "time"), (120.0, "0", "")])
def test_whatever_it_started_ends_with_it(wall_s: float, sleep_s: str, stopped: str) -> None:
    try:
        sandbox = Sandbox(Limits(wall_s=wall_s))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    marker = f"marker-{time.monotonic_ns()}"
    assert sandbox.run({"a.py": ESCAPE}, ["a.py", marker, sleep_s]).stopped == stopped
    left = [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or ())]
    assert psutil.wait_procs(left, timeout=60)[1] == []


def test_where_no_sandbox_can_be_made_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="util-linux"):
        Sandbox()
