"""Whole runs whose processes are forked from one that has imported torch and transformers already.

Nine tenths of the processor time of a short run are imports: a ModelWorker and a GenerationServer take five seconds
each until they do anything. So tests start a template once (`Template`), a process that imports what any process of a
run imports, and then only forks. Everything else is as it is without it: launcher, supervisors and workers are
processes of their own with the same parents, arguments, environments, descriptors and signals, and run the same code.

    pytest ── template (imports, then forks)
                 └─ launcher ── spawner (forks supervisors from the template's state, not the launcher's)
                       └─ supervisor ── worker

Each process begins with the modules of the template and nothing else of any run: the spawner is forked before the
launcher does anything. A supervisor is the spawner's grandchild whose parent ends at once, so that the kernel hands it
to the launcher, which is a subreaper for that moment.

Only `python -m asyncrl.launch`, rehearsals, checks of model folders, rules for pictures, supervisors, workers and the
making of base models are forked; all else that a process starts (processes of users' code, SGLang, tools) is started as
always. What is about the start itself, about what a process has not imported or about its memory runs cold:
`start_run(cold=True)`. `ASYNCRL_COLD_TESTS=1 make test` runs everything so.

On other hosts, which are this machine in tests, nobody forks from the template: ssh and such start supervisors there.
Below them a *stand-in* (`python_of_hosts`) has the template fork the process in its place, passes signals on to it, and
ends as it does. If the stand-in is killed, so is the process.

    supervisor ── stand-in  · · ·  guard (a child of nobody) ── worker

Workers of pytest are forked the same way (`--worker`, in the Makefile): they import the same to collect the tests. They
have a spawner too, for the programs that check a start (`CHECKS`); what else tests start in them is about the start
itself. Programs in other virtual environments, whose imports take as long, are forked as well (`stand_in`): each has a
template of its own.

Linux only, like supervisors.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = (
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.PpmImagePlugin",
    "cryptography.hazmat.primitives.serialization",
    "cryptography.x509",
    "encodings.idna",
    "omegaconf",
    "peft",
    "rich.console",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "setproctitle",
    "asyncrl.algorithms.advantages",
    "asyncrl.algorithms.objective",
    "asyncrl.algorithms.corrections",
    "asyncrl.algorithms.critic",
    "asyncrl.algorithms.grpo",
    "asyncrl.algorithms.policy_losses",
    "asyncrl.launch.train",
    "asyncrl.launch.before_start.setting_checks",
    "asyncrl.launch.commands",
    "asyncrl.config.load",
    "asyncrl.inference.embedded.host",
    "asyncrl.inference.process",
    "asyncrl.manager.process",
    "asyncrl.master.process",
    "asyncrl.rollout.process",
    "asyncrl.runtime.backends",
    "asyncrl.trainer.engines.flat",
    "asyncrl.trainer.engines.sharded.loader",
    "asyncrl.trainer.functions",
    "asyncrl.trainer.model.load_models",
    "asyncrl.trainer.process",
)
"""Modules that the processes of a run import, one or the other."""
CHECKS = ("asyncrl.launch.before_start.rehearsal", "asyncrl.models.picture_rules", "asyncrl.weights.whole_folder")
"""Modules that are forked where a worker of pytest starts them."""
MODULES = (*CHECKS, "asyncrl.launch", "asyncrl.runtime.main", "asyncrl.trainer.supervised.child")
"""Modules that are forked, beside supervisors, where a launcher starts them."""
BUILD_ENGINES = ("asyncrl.runtime.main", "asyncrl.trainer.supervised.child")
"""Those of them whose processes build engines, and take what others have proven of a model (`tests/proofs.py`)."""
_PYTHON = sys.executable  # tests have another one told
_TITLE_SPACE = "-" * 400  # an argument, over which processes write their titles
_ENVIRONMENT_SPACE = 64 * 1024  # bytes, over which processes write their environments
_DEATH_SIGNAL, _SUBREAPER, _IS_SUBREAPER = 1, 36, 37
_keep_proofs: list[partial[None]] = []
"""What makes a process keep results of proofs, in a template of asyncrl's processes and in those that it forks."""
RUN_VARIABLE = "ASYNCRL_TESTS_TEMPLATE"
"""Environment variable of a worker of pytest that was forked: the run whose template it came from."""

MORE_VARIABLE = "ASYNCRL_TESTS_PRELOADED"
"""Environment variable with further modules, which many tests import."""


def _address(run: str) -> str:
    """The socket of the template of a run of pytest, which goes with the process."""
    return f"\0tests of asyncrl {run}"


class WarmProcess:
    """A forked `python -m ...`, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, stdout: IO[str]) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._connection = connection
        self.pid = int(_line(connection))

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            ended, _, _ = select.select([self._connection], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(_line(self._connection)))
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported everything, one for all workers of pytest in a `run` of it.

    Started by the first that needs it, it ends once none is connected to it any more. It runs `python`, and imports
    `modules`, by default what processes of runs import.
    """

    def __init__(self, run: str, python: str = sys.executable, modules: Sequence[str] = ()) -> None:
        self.run, self.python, self.modules = run, python, modules
        self._address = _address(run)
        self._control: socket.socket | None = None

    def launch(
        self, arguments: Sequence[str], environment: Mapping[str, str], module: str = "asyncrl.launch"
    ) -> WarmProcess:
        """Fork `python -m module *arguments` in a session of its own, with both outputs in one pipe."""
        output, written = os.pipe()
        try:
            return self._fork([sys.executable, "-m", module, *arguments], environment, written, output)
        finally:
            os.close(written)

    def popen(self, command: Sequence[str], *, stdout: IO[bytes], **given: object) -> WarmProcess:
        """What `subprocess.Popen` is called with to run `python -m ...` in a session of its own, into a file."""
        assert given == {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        return self._fork(command, os.environ, stdout.fileno(), os.open(os.devnull, os.O_RDONLY))

    def _fork(self, command: Sequence[str], environment: Mapping[str, str], written: int, output: int) -> WarmProcess:
        control = self.connect()
        ours, theirs = socket.socketpair()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            _send(
                control,
                {"arguments": list(command), "environment": dict(environment), "folder": os.getcwd()},
                [nothing, written, written, theirs.fileno()],
            )
        finally:
            theirs.close()
            os.close(nothing)
        return WarmProcess(ours, os.fdopen(output, encoding="utf-8", errors="replace"))

    def connect(self) -> socket.socket:
        """Start it, unless another has; it lasts as long as the connection."""
        if self._control is None:
            self._control = self._connect()
        return self._control

    def close(self) -> None:
        """Leave it; what it forked goes on."""
        if self._control is not None:
            self._control.close()

    def _connect(self) -> socket.socket:
        started = None
        while True:
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(self._address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    assert started is None, "the template has ended: see what it wrote to pytest's standard error"
                    listener.listen()
                    started = _start(listener, self.python, self.modules)
            control = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(ConnectionError):  # it is about to listen, or has just ended
                control.connect(self._address)
                if control.recv(1):
                    return control
            control.close()


def _start(listener: socket.socket, python: str, modules: Sequence[str]) -> int:
    """Start the template; its process id. Nobody waits for its end."""
    listener.set_inheritable(True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPT_NOENV": "1", "SPACE": "-" * _ENVIRONMENT_SPACE}
    command = [python, "-P", __file__, str(listener.fileno()), _TITLE_SPACE, *modules]
    outputs = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    return os.posix_spawn(python, command, environment, file_actions=outputs)


def main(number: int, modules: Sequence[str]) -> None:
    """Import everything, then fork a launcher for each request of those that connect to the socket `number`."""
    gc.disable()  # what is imported stays
    for name in modules or (*PRELOADED, *os.environ.get(MORE_VARIABLE, "").split()):
        importlib.import_module(name)
    if not modules:
        _compute_what_is_kept()
        _keep_proofs.append(_keeper_of_proofs(Path(tempfile.mkdtemp(prefix="asyncrl-proofs-"))))
    _become_titled("tests of asyncrl: template")
    gc.collect()
    gc.freeze()
    gc.enable()
    listener = socket.socket(fileno=number)
    listener.set_inheritable(False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle
    controls = [_greeted(listener)]
    reported: dict[int, socket.socket] = {}
    tests: dict[int, str] = {}
    while controls:
        readable, _, _ = select.select([listener, woken, *controls], [], [])
        if listener in readable:
            controls.append(_greeted(listener))
        if woken in readable:
            os.read(woken, 4096)
            for pid in list(reported):
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if ended:
                    _note_seconds(used.ru_utime + used.ru_stime, tests.pop(pid))
                    with contextlib.suppress(BrokenPipeError):  # its pytest has ended
                        reported[pid].sendall(b"%d\n" % status)
                    reported.pop(pid).close()
        for control in [each for each in controls if each in readable]:
            request, descriptors = _receive(control)
            if not request:
                control.close()
                controls.remove(control)
                continue
            *standard, teller = descriptors
            pid = os.fork()
            if not pid:
                if request.get("stands_in"):
                    _guard(request, standard, socket.socket(fileno=teller))
                _launch(request, standard)
            for descriptor in standard:
                os.close(descriptor)
            if request.get("stands_in"):
                os.close(teller)
                os.waitpid(pid, 0)
                continue
            tests[pid] = request["environment"].get("PYTEST_CURRENT_TEST", "")
            reported[pid] = socket.socket(fileno=teller)
            reported[pid].sendall(b"%d\n" % pid)
    for keep in _keep_proofs:
        shutil.rmtree(keep.args[1], ignore_errors=True)  # a process that is ending may write yet
    os._exit(0)


def _note_seconds(seconds: float, test: str) -> None:
    """Note the processor time of a launcher and all that it waited for, where `.ci/cpu_seconds.py` asks for it."""
    if file := os.environ.get("ASYNCRL_TESTS_CPU_SECONDS"):
        with Path(file).open("a") as notes:
            notes.write(f"{seconds:.2f} {test}\n")


def _compute_what_is_kept() -> None:
    """Make what is computed once in a process and kept, the same for all of them: the parser of settings, a thousand
    regular expressions for the names of weights, the functions that settings may name.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from asyncrl.config.load import load_experiment
    from asyncrl.config.plugin_code import catalog

    load_experiment("async_ppo", ["seed=1"])
    get_checkpoint_conversion_mapping("qwen2")
    for kind in ("policy_loss", catalog.MODEL_FUNCTION):
        catalog.known(kind)


def _keeper_of_proofs(folder: Path) -> partial[None]:
    """Return what makes a process keep results of proofs in `folder`. Loaded by its path: `tests` is not on ours."""
    import pytest

    spec = importlib.util.spec_from_file_location("proofs_of_tests", Path(__file__).with_name("proofs.py"))
    assert spec is not None
    assert spec.loader is not None
    proofs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proofs)
    return partial(proofs.keep_proofs, pytest.MonkeyPatch(), folder)


def _greeted(listener: socket.socket) -> socket.socket:
    """The next that connects, which waits for a byte."""
    control, _ = listener.accept()
    control.sendall(b"+")
    return control


def _launch(request: Mapping[str, Any], standard: Sequence[int]) -> NoReturn:
    """Be what is asked for, in a process that has just been forked from the template."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _take(standard, ())
    if not request.get("stands_in"):
        os.setsid()
    _become(request)


def _guard(request: Mapping[str, Any], standard: Sequence[int], stand_in: socket.socket) -> NoReturn:
    """Fork a process that forks what is asked for, tells its end to the stand-in, and kills it where that ends."""
    if os.fork():
        os._exit(0)
    os.setsid()  # the guard leads the session, not what it forks, which a terminal that it opens would belong to
    guard, pid = os.getpid(), os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        _launch(request, standard)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that listed them
            if number > 2 and number != stand_in.fileno():
                os.close(number)
    stand_in.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([ended, stand_in], [], [])
    if ended not in readable:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # the stand-in has ended
        stand_in.sendall(b"%d\n" % status)
    os._exit(0)


def python_of_hosts(template: Template, folder: Path, *, module: str = "asyncrl.runtime.main") -> Path:
    """Make an interpreter for `system.hosts`; below it the template forks processes of runs, or those of `module`."""
    return stand_in(template, folder, f'[ "$2" = {module} ] && ', f'exec {sys.executable} "$@"\n')


def stand_in(template: Template, folder: Path, where: str = "", otherwise: str = "") -> Path:
    """Make an interpreter whose programs the template forks, where the shell's condition `where` holds."""
    template.connect()
    file = folder / "python"
    command = shlex.join([sys.executable, "-I", "-S", __file__, "--stand-in", template.run])
    file.write_text(f'#!/bin/sh\n{where}exec {command} "$@"\n{otherwise}')
    file.chmod(0o755)
    return file


@contextlib.contextmanager
def forked(template: Template | None, python: str, modules: Sequence[str], folder: Path) -> Iterator[str]:
    """Make an interpreter in `folder` whose programs begin where `python` has imported `modules`, beside `template`.
    Without one it is `python` itself.
    """
    if template is None:
        yield python
        return
    forks = Template(f"{template.run} {python}", python, modules)
    try:
        yield str(stand_in(forks, folder))
    finally:
        forks.close()


def _stand_in(control: socket.socket, arguments: Sequence[str], *, tests: bool = False) -> NoReturn:
    """Have the template fork `python *arguments`, which `tests`, and be signalled and end in its stead."""
    reported, theirs = socket.socketpair()
    command, environment = [sys.executable, *arguments], dict(os.environ)
    request = {"arguments": command, "environment": environment, "folder": os.getcwd(), "stands_in": True}
    _send(control, request | {"tests": tests}, [0, 1, 2, theirs.fileno()])
    theirs.close()
    pid = int(_line(reported))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(int(_line(reported)))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _on_a_host(run: str, arguments: Sequence[str]) -> NoReturn:
    """Be a process of a run on another host."""
    control = socket.socket(socket.AF_UNIX)
    control.connect(_address(run))
    assert control.recv(1), "the template has ended"
    _stand_in(control, arguments)


def _worker(arguments: Sequence[str]) -> NoReturn:
    """Be `python -u -c CODE`, a worker of the pytest that started this."""
    if sys.platform != "linux" or os.environ.get("ASYNCRL_COLD_TESTS"):
        os.execv(sys.executable, [sys.executable, *arguments])
    os.environ[RUN_VARIABLE] = str(os.getppid())
    _stand_in(Template(os.environ[RUN_VARIABLE]).connect(), arguments, tests=True)


def _spawn(requests: socket.socket) -> NoReturn:
    """Be the spawner: fork a process for each request, until the one it is for has ended."""
    _become_titled("tests of asyncrl: spawner")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, descriptors = _receive(requests)
        if not request:
            os._exit(0)
        reported, tells = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if pid:
                os.write(tells, b"%d\n" % pid)
                os._exit(0)
            requests.detach()
            _take(descriptors[:3], list(zip(request["kept"], descriptors[3:], strict=True)))
            if request["session"]:
                os.setsid()
            _become(request)
        os.waitpid(middle, 0)  # the process is the child of the one that asked by now
        requests.sendall(os.read(reported, 64))
        for descriptor in (reported, tells, *descriptors):
            os.close(descriptor)


def _spawn_below(modules: Sequence[str]) -> None:
    """Give this process a spawner, which starts what `subprocess` is to start here and is one of `modules`."""
    spawner, theirs = socket.socketpair()
    if not os.fork():
        spawner.close()
        _spawn(theirs)
    theirs.close()
    start, one_at_a_time, own = subprocess._fork_exec, threading.Lock(), os.getpid()  # type: ignore[attr-defined]

    def fork_exec(arguments: Sequence[str], *rest: Any) -> int:
        command = list(map(os.fsdecode, arguments))
        if not _is_forked(command, modules) or os.getpid() != own:
            return int(start(arguments, *rest))
        _, _, kept, folder, environment, stdin, _, _, stdout, _, stderr, _, errors, _, session, *_ = rest
        kept = [descriptor for descriptor in kept if descriptor != errors]
        pairs = os.environb.items() if environment is None else (entry.split(b"=", 1) for entry in environment)
        request = {
            "arguments": command,
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in pairs},
            "folder": os.getcwd() if folder is None else os.fsdecode(folder),
            "kept": kept,
            "session": bool(session),
        }
        standard = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        with one_at_a_time, _subreaper():
            _send(spawner, request, [*standard, *kept])
            return int(_line(spawner))

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans of what is below this process become its children."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, before.value, 0, 0, 0)


def _is_forked(command: Sequence[str], modules: Sequence[str] = MODULES) -> bool:
    if list(command[:2]) == [_PYTHON, "-m"]:
        return command[2] in modules
    isolated = list(command[:3]) == [_PYTHON, "-I", "-S"]
    return modules is MODULES and isolated and command[3].endswith("/asyncrl/runtime/supervisor.py")


def _become(request: Mapping[str, Any]) -> NoReturn:
    """Be what `request` asks for, as if it had been executed, to its end."""
    os.chdir(request["folder"])
    command = request["arguments"]
    if command[1:3] == ["-m", "asyncrl.launch"]:
        _spawn_below(MODULES)
    elif request.get("tests"):
        _spawn_below(CHECKS)
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment()
    _run(command)


def _run(command: Sequence[str]) -> NoReturn:
    """Run this command of Python in this process, and end it as Python ends."""
    _become_titled(" ".join(command))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as at a terminal, though the tests themselves may run under nohup
    random.seed()
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False, encoding="utf-8", errors=errors, buffering=1)
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    search = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    code: object = 0
    what, *given = itertools.dropwhile(lambda each: each in ("-I", "-P", "-S", "-u"), command[1:])
    try:
        if what == "-m":
            sys.path[:0] = [os.getcwd(), *search]
            sys.argv = [what, *given[1:]]
            for site in (Path(folder, "sitecustomize.py") for folder in search):
                if site.is_file():
                    runpy.run_path(str(site))
            for keep in _keep_proofs if given[0] in BUILD_ENGINES else ():
                keep()
            if not hasattr(sys.modules.get(given[0]), "__path__"):
                sys.modules.pop(given[0], None)  # else it is warned of: it would be there before it begins
            runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.path[:0], sys.argv = ["", *search], [what, *given[1:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(given[0], vars(sys.modules["__main__"]))
        else:
            sys.argv = [what, *given]
            if not {"-I", "-P"} & set(command):
                sys.path[:0] = [str(Path(what).parent), *search]
            os.execvp = _execute  # type: ignore[assignment]
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
    os._exit(int(code or 0))  # type: ignore[call-overload]


def _execute(file: str, command: Sequence[str]) -> NoReturn:
    """`os.execvp` in the child of a supervisor."""
    if not _is_forked(command):
        os.execvpe(file, list(command), dict(os.environ))
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that listed them
            if number > 2 and not os.get_inheritable(number):
                os.close(number)
    _run(command)


def _take(standard: Sequence[int], kept: Sequence[tuple[int, int]]) -> None:
    """Make `standard` descriptors 0, 1 and 2, and the second of each pair of `kept` its first; close all others."""
    wanted = [*enumerate(standard), *kept]
    above = 1 + max([2, *(number for number, _ in wanted), *(descriptor for _, descriptor in wanted)])
    held = [(number, fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)) for number, descriptor in wanted]
    for number, descriptor in held:
        os.dup2(descriptor, number, inheritable=True)
    spared = {number for number, _ in held}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in spared:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(number)


def _become_titled(title: str) -> None:
    with contextlib.suppress(ModuleNotFoundError):  # another virtual environment
        import setproctitle

        setproctitle.setproctitle(title)


def _show_environment() -> None:
    """Let the kernel tell this process's environment to those who look at it from outside, as of one just executed.

    It tells what stands where the environment of the template stood, which nothing points to any more.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    reported = b"".join(b"%b=%b\0" % entry for entry in os.environb.items())
    assert len(reported) <= end - begin, f"{len(reported)} bytes of environment, {end - begin} were made room for"
    ctypes.memmove(begin, reported.ljust(end - begin, b"\0"), end - begin)


def _send(connection: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    body = json.dumps(dict(request)).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([b"%10d" % len(body)], rights)
    connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next request with its descriptors; an empty one: the other side has ended."""
    descriptors = array.array("i")
    length, rights, _, _ = connection.recvmsg(10, socket.CMSG_SPACE(64 * descriptors.itemsize))
    for level, kind, data in rights:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    body = b""
    while length and len(body) < int(length):
        body += connection.recv(int(length) - len(body))
    return (json.loads(body) if length else {}), list(descriptors)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        assert byte, "the template has ended: see what it wrote to pytest's standard error"
        line += byte
    return line


if __name__ == "__main__":
    if sys.argv[1] == "--stand-in":
        _on_a_host(sys.argv[2], sys.argv[3:])
    if sys.argv[1] == "--worker":
        _worker(sys.argv[2:])
    main(int(sys.argv[1]), sys.argv[3:])
