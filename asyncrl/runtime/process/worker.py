"""The common base of every process: configure, run, heartbeat, stop.

Life cycle of a worker process

1. The launcher's back end runs `python -m asyncrl.runtime.main <kind> <index> --run-dir DIR`, which finds the class in
   the registry of kinds. Each process has its own log file.
2. `Worker.start` reads `<run_dir>/config.yaml`, opens name resolution and publishes `status/<kind>/<index>` with a
   lease. The lease is the heartbeat: a thread of the resolver renews it, and it lapses when the process dies.
   While the process starts, the status counts its progress, for the processes that wait for it
   (`asyncrl.runtime.process.starting`).
3. `configure` binds sockets and registers their addresses; `run` works until it is done or `stop_requested` is set
   (`supervisor.STOP_SIGNAL`). A stop ends `configure` wherever it is, and `run` where it is `interruptible`.
   A process whose entry is taken, or that may add no entries, was replaced while it was cut off or stopped. It ends
   at once and restores nothing (`NameResolver.fences`): its work belongs to its successor.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, Self, TypeVar

import setproctitle
import uvloop

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolveUnavailable
from asyncrl.comm.request_reply import RemoteError
from asyncrl.comm.security import RunSecret
from asyncrl.config.machine import bypass_proxy
from asyncrl.config.run_dir import SECRET_FILE, read_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.hardware import allow_all_files
from asyncrl.runtime.process.starting import ReportedStatus, StartLimit, StartWait
from asyncrl.runtime.process.waiting import LEAVE_LIMIT_S, await_name, explain_delay
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_LOST, EXIT_OK, EXIT_STATE_LOST
from asyncrl.runtime.supervisor import LAUNCH_VARIABLE, STOP_SIGNAL
from asyncrl.runtime.trials.claim import describe_outage, open_resolver

_Error = TypeVar("_Error", bound=BaseException)


class StateLost(Exception):  # a request to the launcher, not an error
    """The last step is lost; the whole run must begin again with its newest checkpoint."""


class CannotContinue(RuntimeError):
    """The run cannot continue. The message says why; a traceback would add nothing."""


class OutOfMemory(CannotContinue):
    """The process ran out of its device's memory (`asyncrl.config.memory`).

    It is not restarted: the run would continue with the same step, or load the same models, which need as much. The
    process's lines have what happened and the settings to lower, for the doctor.
    """

    @classmethod
    def observed(cls, what: str, advice: str) -> Self:
        """Return the error, and write it into the lines of this process."""
        observer.shortage(what, advice)
        return cls(f"{what}\n{advice}")


class _Stopped(BaseException):
    """Ends the main thread's work after a stop request."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Identity of a worker process.

    Attributes:
        kind: kind of the process, as in `PROCESS_KINDS`.
        index: its number among those of its kind.
        run_dir: the run's folder.
        incarnation: number of its predecessors that died.
        host: address of its host; "" if that is `system.host`.
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


def _held(error: BaseException, kind: type[_Error] | tuple[type[_Error], ...]) -> _Error | None:
    """Return `error`, or the first error in its groups, that is of this kind; None if there is none."""
    found: BaseException | None = error
    while isinstance(found, BaseExceptionGroup):
        some = found.subgroup(kind)
        found = None if some is None else some.exceptions[0]
    return found if isinstance(found, kind) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, the errors in its groups, and their causes."""
    yield error
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _causes(each)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _clear(error: BaseException) -> Exception | None:
    """Return the error in `error` whose message is enough, so that a traceback would add nothing; None if there is
    none. A process that it called may have raised it.
    """
    if found := _held(error, (ConfigError, CannotContinue)):
        return found
    for cause in _causes(error):
        if isinstance(cause, RemoteError) and cause.kind == OutOfMemory.__name__:
            return OutOfMemory(cause.message)
    return None


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
        self.config = read_run_config(spec.run_dir)
        self.config.system.host = spec.host or self.config.system.host
        bypass_proxy(self.config)
        self.log = logging.getLogger(f"asyncrl.{spec.kind}")
        self.resolver = open_resolver(self.config, spec.run_dir)
        self.resolver.fences = {names.incarnation_key(spec.kind, spec.index): str(spec.incarnation)}
        if self.launch:
            self.resolver.fences[names.LAUNCH_KEY] = self.launch
        self.resolver.on_lost, self.resolver.on_fenced = self._name_lost, self._fenced
        secret = RunSecret.load(spec.run_dir / SECRET_FILE) if self.config.system.encrypt else None
        self.http_security = None if secret is None else secret.http(self.config.adopted_urls)
        """Token and certificate of the run's HTTP interfaces; None if the run has no secret."""
        self.security = None if secret is None else secret.sockets()
        """Keys of the run's sockets; None if the run has no secret."""
        status_key, lease_s = names.status_key(spec.kind, spec.index), self.config.system.lease_s
        self.process_status = ReportedStatus(
            self.resolver, status_key, spec.incarnation, lease_s, always=self.always_reports
        )
        self.stop_requested = threading.Event()
        self._interrupts = True
        self._stopped = threading.Event()

    @property
    def name(self) -> str:
        """`<kind>/<index>`, as in name resolution."""
        return self.spec.name

    @property
    def index(self) -> int:
        """Number of this process among those of its kind."""
        return self.spec.index

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.spec.run_dir

    @property
    def launch(self) -> str:
        """The launch that the process belongs to; "" if it was started by hand."""
        return os.environ.get(LAUNCH_VARIABLE, "")

    def start(self) -> int:
        """Run the whole life cycle; returns the process's exit code."""
        setproctitle.setproctitle(f"asyncrl {self.name} [{self.config.experiment_name}/{self.config.trial_name}]")
        allow_all_files()
        observer.start(self.run_dir, self.spec.kind, self.index)
        observer.gauges(lambda: {"names_away_s": round(away_s, 1)} if (away_s := self.resolver.outage_s) else {})
        # Both reach the launcher too, which stops its workers in order. What a worker starts ends by SIGTERM as usual.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            with contextlib.suppress(_Stopped):
                try:
                    signal.signal(STOP_SIGNAL, self._on_stop_signal)
                    self.process_status.set("starting")
                    threading.Thread(
                        target=self.process_status.count_progress, name="start-progress", daemon=True
                    ).start()
                    self.configure()
                    self._interrupts = self.interruptible
                    self.run()
                finally:
                    self._interrupts = False
            self._publish_end("done")
            return EXIT_OK
        except StateLost as error:
            self.log.warning("%s cannot continue: %s", self.name, error)
            return EXIT_STATE_LOST
        except BaseException as error:
            if away := _held(error, NameResolveUnavailable):
                self.log.error("%s failed: %s", self.name, describe_outage(away, self.config))
                return EXIT_FAILED
            clear = _clear(error)
            self.log.error("%s failed: %s", self.name, clear or error, exc_info=clear is None)
            reason = f"{type(clear or error).__name__}: {clear or error}"
            observer.failed(reason)
            self._publish_end("failed", reason)
            return EXIT_FAILED
        finally:
            self.process_status.stop()
            self.close()
            self.resolver.close()
            observer.close()
            self._stopped.set()

    def _publish_end(self, state: names.State, reason: str = "") -> None:
        """Publish the last state without waiting for it: the launcher kills a process that takes too long to end."""
        self.resolver.hurry(0.0)
        try:
            self.process_status.set(state, reason)
        except NameResolveError as error:
            self.log.warning("%s ends as %s, which could not be published: %s", self.name, state, error)

    def request_stop(self) -> None:
        """Ask `run` to end soon. May be called from a signal handler."""
        if self.stop_limit_s is not None and not self.stop_requested.is_set():
            explain_delay(self._stopped, self.stop_limit_s, self._loop)
        self.stop_requested.set()
        self.resolver.hurry()

    def _on_stop_signal(self, *_: object) -> None:
        self.request_stop()
        if self._interrupts:  # nothing checks the request: loading a model takes long
            raise _Stopped

    def _name_lost(self, name: str) -> None:
        """Handle the loss of `name` to another process. Called by a thread of the resolver."""
        if name == names.status_key(self.spec.kind, self.index):
            self._fenced()

    def _fenced(self) -> NoReturn:
        """Exit at once, from any thread. The process may be doing anything, so nothing is closed or written."""
        self.log.error("%s ends at once: it was replaced by another process", self.name)
        os._exit(EXIT_LOST)

    def configure(self) -> None:
        """Bind sockets, load models or data, register addresses. The default does nothing."""
        return None

    @abstractmethod
    def run(self) -> None:
        """Work until done or until `stop_requested` is set."""

    def close(self) -> None:
        """Release what `configure` acquired; also called after a failure. The default does nothing."""
        return None

    def ready(self) -> None:
        """Report to the launcher that this worker can serve.

        All objects that exist now are excluded from garbage collection: they stay until the end, and scanning a model's
        libraries takes a tenth of a second each time.
        """
        gc.collect()
        gc.freeze()
        observer.stage("ready", Activity.serves)
        self.process_status.set("ready")
        self.log.info("%s is ready (pid %d)", self.name, os.getpid())

    def exit_if_fenced(self) -> None:
        """Exit at once if another process has taken this one's place, or is about to."""
        if self.resolver.is_fenced():
            self._fenced()

    def start_wait(self, kind: str, what: str, *, whom: str = "") -> StartWait:
        """Return a wait for something that processes of `kind` do while they start.

        Their progress counts as this process's progress.

        Args:
            what: the awaited action, for messages.
            whom: the awaited processes, for the display.
        """
        limit = StartLimit("system.start_timeout_s", self.config.system.start_timeout_s)
        observer.stage(f"waits for {whom or f'{what} of a {kind}'}", Activity.blocked)
        return StartWait(self.resolver, kind, what, limit, progressed=self.process_status.others_progressed)


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

    async def registered(self, key: str, kind: str) -> str:
        """Wait until a process of `kind` registers `key` in name resolution, and return the entry.

        Raises:
            NotStarted: no process of `kind` makes progress for `system.start_timeout_s`.
            StopRequested: a stop was requested.
        """
        whom = key.removeprefix(f"{names.WORKERS}/") if key.startswith(f"{names.WORKERS}/") else f"{kind} ({key})"
        waiting = await asyncio.to_thread(self.start_wait, kind, f"name {key!r}", whom=whom)
        return await await_name(self.resolver, key, waiting.look, self.stop)

    @abstractmethod
    async def main(self) -> None:
        """Work until done or until `stop` is set."""


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Exclude everything that is imported in this block, and all earlier objects, from garbage collection for good.

    While torch and transformers are imported, the collector scans hundreds of thousands of objects again and again, and
    once more in each full collection afterwards. That costs 0.8 of the 4.4 s of CPU time until a model can be loaded,
    and a pause of 0.2 s in each full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
