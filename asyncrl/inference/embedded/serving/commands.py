"""Commands of other threads to the engine's thread: a mailbox that is read between two steps, with futures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl.inference.embedded.engine_io import EngineStoppedError, MemoryStateError
from asyncrl.models.weights.model_files.loading import WeightUpdateError

T = TypeVar("T")


@dataclass(slots=True)
class Command(Generic[T]):
    """A function for the engine's thread, and the future that gets its result.

    A command whose future is cancelled is skipped.

    Attributes:
        started: future of the work that the function only starts; `fail` fails it too. None if there is no such work.
    """

    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)
    started: Future[Any] | None = None

    def run(self) -> None:
        """Run the command. Only the caller gets a refusal; any other exception is also raised here, and ends the
        engine.
        """
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except (WeightUpdateError, MemoryStateError) as error:
            self.future.set_exception(error)
        except Exception as error:
            self.future.set_exception(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fail the command, which was not run, and the work that it would have started."""
        for future in (self.future, self.started):
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)


class Mailbox:
    """Commands from any thread to the one that reads; after it is closed, later ones are refused."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: deque[Command[Any]] = deque()
        self.closed = False
        """True once `close` was called."""

    def post(self, function: Callable[[], T], *, starts: Future[Any] | None = None) -> Future[T]:
        """Have the reader run `function`.

        Args:
            starts: future of the work that `function` starts; it fails if the mailbox is closed before `function` runs.

        Raises:
            EngineStoppedError: the mailbox is closed.
        """
        command = Command(function, started=starts)
        with self._wake:
            if self.closed:
                raise EngineStoppedError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()
        return command.future

    def take(self) -> Command[Any] | None:
        """Take the oldest command; None if there is none."""
        with self._wake:
            return self._commands.popleft() if self._commands else None

    def wait(self) -> None:
        """Sleep until there is a command or the mailbox is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self.closed)

    def close(self) -> None:
        """Accept no more commands, and wake the reader."""
        with self._wake:
            self.closed = True
            self._wake.notify()
