"""Copies between a device and host memory, made beside what the device computes.

On a GPU each copy runs on a stream of its own, into pinned memory. The thread that asks for it goes on at once, and so
does the device:

    copy = copies.begin(pairs)     queued behind all that computes the sources
    copy.before_changes()          the *device* waits: what is queued later may change the sources
    copy.wait()                    the *host* waits: the copied values may be read

A copy whose sources nothing changes until it has ended needs the last call only. On a CPU, and on any other device, the
same calls copy at once, and both waits return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory as _register  # as torch's own checkpoints in shared memory
from torch.cuda._pin_memory_utils import unpin_memory as _unregister

_MEASURED_BYTES = 32 << 20


class Event(Protocol):
    """The end of a copy on a stream."""

    def wait(self) -> None:
        """Have the host wait for it."""

    def before_changes(self) -> None:
        """Have the device wait for it before it does what the calling thread queues from now on."""


class CopyStream(Protocol):
    """A device's queue of copies to the host."""

    def queue(self, copy: Callable[[], None]) -> Event:
        """Queue `copy` behind all that the calling thread has queued on the device; return its end."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.synchronize()

    def before_changes(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def queue(self, copy: Callable[[], None]) -> Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
        return _CudaEvent(self._stream)


def stream_of(device: torch.device) -> CopyStream | None:
    """Make a stream for copies from `device`; None if they are made at once."""
    return _CudaStream(device) if device.type == "cuda" else None


class HostCopy:
    """A copy that has begun; see the module's docstring."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self._events = tuple(events)

    def wait(self) -> None:
        """Wait until the copied values may be read on the host."""
        for event in self._events:
            event.wait()

    def before_changes(self) -> None:
        """Let the copy end before the device changes the sources by what the calling thread queues from now on."""
        for event in self._events:
            event.before_changes()


class HostCopies:
    """Begins copies; one stream per device, so copies of one device run one after the other.

    Args:
        stream_of: makes the stream of a device; None: copies from it are made at once.
    """

    def __init__(self, stream_of: Callable[[torch.device], CopyStream | None] = stream_of) -> None:
        self._stream_of = stream_of
        self._streams: dict[torch.device, CopyStream | None] = {}

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> HostCopy:
        """Begin to copy, for each pair (target, source), the source into the target of the same shape and type.

        One of the two is in host memory. A target on the device must not be used before `before_changes`.
        """
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for target, source in pairs:
            device = target.device if source.device.type == "cpu" else source.device
            by_device.setdefault(device, []).append((target, source.detach()))
        events = []
        for device, together in by_device.items():
            stream = self._stream(device)
            if stream is None:
                _copy(together)
            else:
                events.append(stream.queue(partial(_copy, together)))
        return HostCopy(events)

    def each(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in host memory, by name; the next one is copied while the caller uses the one before.

        A yielded tensor is valid until the next iteration, and so may be those of `tensors`. One that is not copied by
        a stream is yielded as it is.
        """
        under_way: list[tuple[str, Tensor, HostCopy]] = []
        for name, tensor in tensors:
            if self._stream(tensor.device) is not None:
                host = host_like(tensor)
                copy = self.begin([(host, tensor)])
                copy.before_changes()  # the next tensor may have the same memory
                under_way.append((name, host, copy))
                if len(under_way) == 1:
                    continue
            yield from map(_ended, under_way[:1])
            del under_way[:1]
            if self._stream(tensor.device) is None:
                yield name, tensor
        yield from map(_ended, under_way)

    def _stream(self, device: torch.device) -> CopyStream | None:
        if device not in self._streams:
            self._streams[device] = self._stream_of(device)
        return self._streams[device]


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor in host memory, not set, for copies to or from `device`: pinned if that is a GPU.

    torch keeps pinned memory that is freed, and gives it out again.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def host_like(source: Tensor) -> Tensor:
    """Return host memory for a copy of `source`, not set."""
    return host_buffer(source.shape, source.dtype, source.device)


def copy_rate(device: torch.device) -> float:
    """Measure the rate of copies from `device` to host memory that is used again, bytes per second."""
    source = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    host, copies = host_like(source).zero_(), HostCopies()
    began = 0.0
    for _ in range(2):  # the first one makes the stream
        began = perf_counter()
        copies.begin([(host, source)]).wait()
    return _MEASURED_BYTES / (perf_counter() - began)


def pin(memory: Tensor) -> bool:
    """Pin host memory that torch has not allocated, for copies from a GPU.

    `unpin` it before it is unmapped: CUDA refuses copies to what the system maps at the same addresses next.

    Returns:
        False if CUDA refuses; copies into the memory are right then too, but the host waits for them.
    """
    with suppress(RuntimeError):
        _register(memory.data_ptr(), memory.nbytes)
        return True
    return False


def unpin(memory: Tensor) -> None:
    """End `pin`, after all copies into the memory have ended."""
    _unregister(memory.data_ptr())


def _ended(copied: tuple[str, Tensor, HostCopy]) -> tuple[str, Tensor]:
    name, host, copy = copied
    copy.wait()
    return name, host


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
