"""The common base of every process: configure, run, heartbeat, stop.

Life cycle of a worker process

1. The launcher's back end runs `python -m asyncrl.runtime.main <kind> <index> --run-dir DIR`, which finds the class in
   the registry of kinds. Each process has its own log file.
2. `Worker.start` reads `<run_dir>/config.yaml`, opens name resolution and publishes `status/<kind>/<index>` with a
   lease. The lease is the heartbeat: the resolver's keep-alive thread renews it, and it lapses when the process dies.
   While the process starts, the status counts its progress, for the processes that wait for it
   (`asyncrl.runtime.process.starting`).
3. `configure` binds sockets and registers their addresses; `run` works until it is done or `stop_requested` is set
   (`supervisor.STOP_SIGNAL`). A stop ends `configure` wherever it is, and `run` where it is `interruptible`.
   A process that finds its entry taken, or may add none, was replaced while it was cut off or stopped. It ends at
   once and puts nothing back (`NameResolver.fences`): its work belongs to its successor.
4. The last status (`done`, or `failed` with the reason) is published without a lease, so that it outlives the process.

A worker never outlives the launcher that started it, and what a worker started never outlives the worker. The
supervisor between the two ensures both (`asyncrl.runtime.supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

import setproctitle
import uvloop

from asyncrl.comm import names
from asyncrl.comm.name_resolve import (
    NameBackend,
    NameResolveError,
    NameResolver,
    NameResolveUnavailable,
    make_resolver,
)
from asyncrl.comm.security.run_secret import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import NAMES_DIR, SECRET_FILE, read_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.observe import observer
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_LOST, EXIT_OK, EXIT_RESTART_TRAINER
from asyncrl.runtime.process.descriptors import allow_all_files
from asyncrl.runtime.process.process_tree import LAUNCH_VARIABLE
from asyncrl.runtime.process.starting import Effort, StartLimit, StartWait
from asyncrl.runtime.process.stopping import LEAVE_LIMIT_S, explain_delay
from asyncrl.runtime.process.waiting import await_name
from asyncrl.runtime.settings import etcd_access
from asyncrl.runtime.supervisor import STOP_SIGNAL

_Error = TypeVar("_Error", bound=BaseException)
_LOOKS_PER_LEASE = 3
"""Checks for progress per lease while a process starts: as often as the lease is renewed."""


class RestartTrainer(Exception):  # it asks for something; nothing went wrong here
    """This process cannot continue alone; the whole trainer must restart from its in-memory checkpoint."""


class CannotContinue(RuntimeError):
    """The run cannot continue. The message says why; a traceback would add nothing."""


class _Stopped(BaseException):
    """Ends the main thread's work after a stop request."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Identity of a worker process: the `index`-th of its `kind` in the run of `run_dir`, after `incarnation`
    predecessors that died. `host` is its address if it is not `system.host`.
    """

    kind: str
    index: int
    run_dir: Path
    incarnation: int = 0
    host: str = ""

    @property
    def name(self) -> str:
        """`<kind>/<index>`, as in name resolution."""
        return f"{self.kind}/{self.index}"


def open_resolver(config: ExperimentConfig, run_dir: Path, *, patience_s: float | None = None) -> NameResolver:
    """Name resolution of the run in `run_dir`, as `config.system` says; with `patience_s` less patient."""
    system, trial = config.system, f"{config.experiment_name}/{config.trial_name}"
    patience_s = system.name_resolve_timeout_s if patience_s is None else patience_s
    root, etcd = str(run_dir / NAMES_DIR), None
    if system.name_resolve == NameBackend.etcd3:
        root, etcd = f"/asyncrl/{trial}", etcd_access(system)
    elif system.name_resolve_root:  # which other trials may share
        root = str(Path(system.name_resolve_root).expanduser() / trial)
    return make_resolver(system.name_resolve, root, etcd=etcd, patience_s=patience_s)


def _held(error: BaseException, kind: type[_Error] | tuple[type[_Error], ...]) -> _Error | None:
    """Return the error of this kind that `error` is, or holds as a group; None without one."""
    found: BaseException | None = error
    while isinstance(found, BaseExceptionGroup):
        some = found.subgroup(kind)
        found = None if some is None else some.exceptions[0]
    return found if isinstance(found, kind) else None


def outage_told(error: NameResolveUnavailable, config: ExperimentConfig) -> str:
    """Return the sentence for the user about an outage that lasted too long."""
    limit_s = config.system.name_resolve_timeout_s
    return f"{error}; the run ends, as system.name_resolve_timeout_s={limit_s:g} allows no longer outage"


class Worker(ABC):
    """Base of a process. Subclasses override `configure`, `run` and `close`; see the module's docstring."""

    interruptible: ClassVar[bool] = False
    """True if a stop interrupts `run` anywhere. Otherwise `run` checks `stop_requested` itself."""
    always_reports: ClassVar[bool] = False
    """True if the status counts progress also after the process is ready, as others wait for its later work."""

    stop_limit_s: ClassVar[float | None] = LEAVE_LIMIT_S
    """Seconds to stop; then the log says where the process is. None: it finishes its work first."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.kind = spec.kind
        self.index = spec.index
        self.run_dir = spec.run_dir
        self.config = read_run_config(spec.run_dir)
        self.config.system.host = spec.host or self.config.system.host
        self.log = logging.getLogger(f"asyncrl.{self.kind}")
        self.resolver = open_resolver(self.config, spec.run_dir)
        self.resolver.fences = {names.incarnation_key(self.kind, self.index): str(spec.incarnation)}
        self.launch = os.environ.get(LAUNCH_VARIABLE, "")
        """The launch that the process belongs to; "" if it was started by hand."""
        if self.launch:
            self.resolver.fences[names.LAUNCH_KEY] = self.launch
        self.resolver.on_lost, self.resolver.on_fenced = self._name_lost, self._fenced
        secret = RunSecret.load(spec.run_dir / SECRET_FILE) if self.config.system.encrypt else None
        self.http_security = None if secret is None else secret.http(self.config.adopted_urls)
        """Token and certificate of the run's HTTP interfaces; None if the run has no secret."""
        self.security = None if secret is None else secret.sockets()
        """Keys of the run's sockets; None if the run has no secret."""
        self.stop_requested = threading.Event()
        self._interrupts = True
        self._state: names.State | None = None
        self._progress, self._others_progressed = 0, False
        self._telling = threading.RLock()
        self._started = threading.Event()
        self._stopped = threading.Event()

    @property
    def name(self) -> str:
        """`<kind>/<index>`, as in name resolution."""
        return self.spec.name

    def start(self) -> int:
        """Run the whole life cycle; returns the process's exit code."""
        setproctitle.setproctitle(f"asyncrl {self.name} [{self.config.experiment_name}/{self.config.trial_name}]")
        allow_all_files()
        observer.start(self.run_dir, self.kind, self.index)
        # Both reach the launcher too, which stops its workers in order. What a worker starts ends by SIGTERM as usual.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            with contextlib.suppress(_Stopped):
                try:
                    signal.signal(STOP_SIGNAL, self._on_stop_signal)
                    self.set_status("starting")
                    threading.Thread(target=self._report_progress, name="start-progress", daemon=True).start()
                    self.configure()
                    self._interrupts = self.interruptible
                    self.run()
                finally:
                    self._interrupts = False
            self._tell_end("done")
            return EXIT_OK
        except RestartTrainer as error:
            self.log.warning("%s cannot go on alone: %s", self.name, error)
            return EXIT_RESTART_TRAINER
        except BaseException as error:
            if away := _held(error, NameResolveUnavailable):
                self.log.error("%s failed: %s", self.name, outage_told(away, self.config))
                return EXIT_FAILED
            told = _held(error, (ConfigError, CannotContinue))  # its message is for people, where it was found is not
            self.log.error("%s failed: %s", self.name, told or error, exc_info=told is None)
            self._tell_end("failed", f"{type(told or error).__name__}: {told or error}")
            return EXIT_FAILED
        finally:
            self._started.set()
            self.close()
            self.resolver.close()
            observer.close()
            self._stopped.set()

    def _tell_end(self, state: names.State, reason: str = "") -> None:
        """Publish the last state without waiting for it: the launcher kills a process that takes too long to end."""
        self.resolver.end_soon()
        try:
            self.set_status(state, reason)
        except NameResolveError as error:
            self.log.warning("%s ends as %s, which could not be told: %s", self.name, state, error)

    def request_stop(self) -> None:
        """Ask `run` to end soon. May be called from a signal handler."""
        if self.stop_limit_s is not None and not self.stop_requested.is_set():
            explain_delay(self._stopped, self.stop_limit_s, self._loop)
        self.stop_requested.set()
        self.resolver.hurry()

    def _on_stop_signal(self, *_: object) -> None:
        self.request_stop()
        if self._interrupts:  # nothing looks at the request: loading a model takes its time
            raise _Stopped

    def _name_lost(self, name: str) -> None:
        """Handle the loss of `name` to another process. Called by a thread of the resolver."""
        if name == names.status_key(self.kind, self.index):
            self._fenced()

    def _fenced(self) -> NoReturn:
        """Exit at once, from any thread. The process may be doing anything, so nothing is closed or written."""
        self.log.error("%s ends at once: it was given up, and another process is in its place", self.name)
        os._exit(EXIT_LOST)

    def configure(self) -> None:
        """Bind sockets, load what is needed, register addresses. The default has nothing to do."""
        return None

    @abstractmethod
    def run(self) -> None:
        """Work until done or until `stop_requested` is set."""

    def close(self) -> None:
        """Release what `configure` acquired; also called after a failure. The default holds nothing."""
        return None

    def ready(self) -> None:
        """Report to the launcher that this worker can serve.

        All objects that exist now are excluded from garbage collection: they stay until the end, and scanning a model's
        libraries takes a tenth of a second each time.
        """
        gc.collect()
        gc.freeze()
        observer.stage("ready")
        self.set_status("ready")
        self.log.info("%s is ready (pid %d)", self.name, os.getpid())

    def exit_if_fenced(self) -> None:
        """Exit at once if another process has taken this one's place, or is about to."""
        if self.resolver.is_fenced():
            self._fenced()

    def set_status(self, state: names.State, reason: str = "") -> None:
        """Publish this worker's state; a last state stays, the others vanish with the process."""
        with self._telling:
            self._state = state
            if state != "starting" and not self.always_reports:
                self._started.set()
            value = names.WorkerStatus(state, os.getpid(), reason, self.spec.incarnation, self._progress).encode()
            lease_s = None if state in ("done", "failed") else self.config.system.lease_s
            self.resolver.add(names.status_key(self.kind, self.index), value, lease_s=lease_s, replace=True)

    def start_wait(self, kind: str, what: str, *, whom: str = "", while_alive: bool = False) -> StartWait:
        """Return a wait for `what` processes of `kind` do while they start.

        Their progress counts as this process's progress.

        Args:
            whom: it waits for, in the words for people.
        """
        limit = StartLimit("system.start_timeout_s", self.config.system.start_timeout_s)
        observer.stage(f"waits for {whom or f'{what} of a {kind}'}")
        return StartWait(
            self.resolver, kind, what, limit, while_alive=while_alive, progressed=self._note_progress_of_others
        )

    def _note_progress_of_others(self) -> None:
        self._others_progressed = True

    def _report_progress(self) -> None:
        """Count progress in the status until this process has started. Runs in a thread."""
        effort = Effort()
        while not self._started.wait(self.config.system.lease_s / _LOOKS_PER_LEASE):
            if not effort.grew() and not self._others_progressed:
                continue
            self._others_progressed = False
            with self._telling:
                if self._state not in ("starting", "ready") or self._started.is_set():
                    return
                self._progress += 1
                try:
                    self.set_status(self._state)
                except NameResolveError as error:
                    self.log.warning("%s cannot tell of its progress: %s", self.name, error)


class AsyncWorker(Worker):
    """A worker whose `run` is a coroutine, `main`, on uvloop."""

    stop: asyncio.Event
    """Set when a stop is requested; bound to the loop before `main` starts."""

    def run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        observer.watch(self._loop)
        self._loop.add_signal_handler(STOP_SIGNAL, self.request_stop)
        if self.stop_requested.is_set():
            self.stop.set()
        await self.main()

    def request_stop(self) -> None:
        super().request_stop()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop.set)

    async def registered(self, key: str, kind: str, *, while_alive: bool = False) -> str:
        """Wait until a process of `kind` registers `key` in name resolution, and return the entry.

        Args:
            while_alive: see `StartWait`.

        Raises:
            NotStarted: no process of `kind` makes progress for `system.start_timeout_s`.
            StopRequested: a stop was requested.
        """
        whom = key.removeprefix(f"{names.WORKERS}/") if key.startswith(f"{names.WORKERS}/") else f"{kind} ({key})"
        waiting = await asyncio.to_thread(self.start_wait, kind, f"name {key!r}", whom=whom, while_alive=while_alive)
        return await await_name(self.resolver, key, waiting.look, self.stop)

    @abstractmethod
    async def main(self) -> None:
        """Work until done or until `stop` is set."""
