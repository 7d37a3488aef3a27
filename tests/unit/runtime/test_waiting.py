"""A stop reaches a process whose main thread waits in native code, where no handler of a signal runs."""

from __future__ import annotations

import subprocess
import sys

from asyncrl.runtime.supervisor import STOP_SIGNAL

STUCK = """
import ctypes, logging, os, signal, sys, threading, time
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.process.waiting import stop_listener

logging.basicConfig(level=logging.INFO)
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(256)
signal.signal(STOP_SIGNAL, lambda *_: print("handled", flush=True))

def act():
    print("heard", flush=True)
    if sys.argv[1] == "helped":
        libc.pthread_mutex_unlock(mutex)

def tell_of_who_waits(held):
    while mutex.raw == held:
        time.sleep(0.01)
    print("waiting", flush=True)

def wait_in_native_code():
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=tell_of_who_waits, args=[mutex.raw]).start()
    libc.pthread_mutex_lock(mutex)  # which notes in the mutex that somebody waits, and comes back with the mutex only

with stop_listener(act, limit_s=float(sys.argv[2])):
    wait_in_native_code()
print("left", flush=True)
"""


def stopped(how: str, limit_s: float) -> tuple[int, list[str], str]:
    """Exit code and outputs of the process, which was asked to stop once it waited."""
    command = [sys.executable, "-c", STUCK, how, str(limit_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(STOP_SIGNAL)
            reported, log = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, reported.splitlines(), log


def test_a_stop_is_heard_in_native_code_and_who_is_helped_out_of_it_goes_on() -> None:
    code, reported, log = stopped("helped", 120.0)
    assert (code, sorted(reported)) == (0, ["handled", "heard", "left"]), log
    assert reported[0] == "heard"


def test_who_does_not_come_out_is_ended_and_the_log_says_where_it_was() -> None:
    code, reported, log = stopped("left alone", 0.1)
    assert (code, reported) == (0, ["heard"]), log
    assert "asked to stop, this process ends now" in log
    assert "in wait_in_native_code" in log
