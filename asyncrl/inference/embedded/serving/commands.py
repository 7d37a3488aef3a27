"""Commands of other threads to the engine's thread: a mailbox, run between two steps, answered by futures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl.inference.embedded.types import EngineStoppedError, MemoryStateError
from asyncrl.weights.model_files.loading import WeightUpdateError

T = TypeVar("T")


@dataclass(slots=True)
class Command(Generic[T]):
    """Something the engine's thread does, and the future that learns of it.

    A command whose caller has given up (the future is cancelled) is skipped.
    """

    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        """Do it. A refusal goes to the caller alone; any other exception is also raised here, and ends the engine."""
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
        """Tell the caller that it will not happen."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Mailbox:
    """Commands from any thread to the one that reads; closing it refuses what comes later."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: deque[Command[Any]] = deque()
        self.closed = False
        """True once `close` was called."""

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have the reader run `function`.

        Raises:
            EngineStoppedError: the mailbox is closed.
        """
        command = Command(function)
        with self._wake:
            if self.closed:
                raise EngineStoppedError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()
        return command.future

    def take(self) -> Command[Any] | None:
        """The oldest command not yet taken."""
        with self._wake:
            return self._commands.popleft() if self._commands else None

    def wait(self) -> None:
        """Sleep until there is a command or the mailbox is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self.closed)

    def close(self) -> None:
        """Accept no more, and wake the reader."""
        with self._wake:
            self.closed = True
            self._wake.notify()
