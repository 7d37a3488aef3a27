"""Copies between a device and host memory, concurrent with the device's computation, and storages that are emptied and
filled again.

On a GPU each copy runs on a separate stream, into pinned memory. The thread that requests it continues at once, and so
does the device:

    copy = copies.begin(pairs)     queued behind the computation of the sources
    copy.wait_on_device()          the *device* waits: work that is queued later may change the sources
    copy.wait()                    the *host* waits: the copied values may be read

If the sources do not change before the copy has ended, only the last call is needed.

A GPU copies to the host in the order of the queue, whatever the stream. So one number that the training thread reads
would wait until all gigabytes of a checkpoint before it are copied. `begin_in_pieces` queues nothing itself: the thread
that waits for the copy queues one piece after the other, and a number waits for one piece at most. `wait_on_device`
queues all remaining pieces.

A CPU, and any other device, copies within the same calls: all at once in `begin`, else piece by piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory as _register  # as torch's own checkpoints in shared memory
from torch.cuda._pin_memory_utils import unpin_memory as _unregister

PIECE_BYTES = 64 << 20
"""1.2 ms at the 54 GB/s that an H100 copies. Smaller pieces would leave the bus idle in between."""
_MEASURED_BYTES = 32 << 20
T = TypeVar("T")
Pair: TypeAlias = tuple[Tensor, Tensor]
"""Target and source of a copy."""


class Event(Protocol):
    """The end of a copy on a stream."""

    def wait(self) -> None:
        """Have the host wait for the end of the copy."""

    def wait_on_device(self) -> None:
        """Have the device wait for the end of the copy before any work that the calling thread queues from now on."""


Queue: TypeAlias = Callable[[Sequence[Pair]], Event]
"""Queues the copies of all pairs; returns their end."""


class CopyStream(Protocol):
    """A device's copies to the host, one after the other."""

    def behind_caller(self) -> Queue:
        """Return a queue, for any thread, whose copies run after all work that the calling thread has queued so far."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind_caller(self) -> Queue:
        return partial(self._queue, torch.cuda.current_stream(self._stream.device).record_event())

    def _queue(self, computed: torch.cuda.Event, pairs: Sequence[Pair]) -> Event:
        self._stream.wait_event(computed)
        with torch.cuda.stream(self._stream):
            copy_pairs(pairs)
        return _CudaEvent(self._stream)


def stream_of(device: torch.device) -> CopyStream | None:
    """Make a stream for copies from `device`; None if the device copies synchronously."""
    return _CudaStream(device) if device.type == "cuda" else None


class HostCopy:
    """A copy from a device to host memory that has begun. Its methods may be called from any thread.

    Args:
        pieces: queue of each piece, and its pairs; pieces of a queue end in their order.
    """

    def __init__(self, pieces: Iterable[tuple[Queue | None, Sequence[Pair]]] = ()) -> None:
        self._left = deque(pieces)
        self._ends: dict[Queue, Event] = {}
        self._lock = Lock()

    def wait(self) -> None:
        """Wait until the copied values may be read on the host; queue each piece once the one before has ended."""
        left = True
        while left:
            with self._lock:
                self._queue_next()
                left, ends = bool(self._left), list(self._ends.values())
            for end in ends:
                end.wait()

    def wait_on_device(self) -> None:
        """Let the copy end before any work that the calling thread queues from now on, which may change the sources."""
        for end in self.queue_all():
            end.wait_on_device()

    def queue_all(self) -> list[Event]:
        """Queue the remaining pieces; return the end of each queue's last one."""
        with self._lock:
            while self._left:
                self._queue_next()
            return list(self._ends.values())

    def _queue_next(self) -> None:
        if not self._left:
            return
        queue, pairs = self._left.popleft()
        if queue is None:
            copy_pairs(pairs)
        else:
            self._ends[queue] = queue(pairs)


class HostCopies:
    """Begins copies; one stream per device, so copies of one device run one after the other.

    Args:
        stream_of: makes the stream of a device; if it returns None, the queueing thread copies synchronously.
        piece_bytes: most bytes of a piece.
    """

    def __init__(
        self,
        stream_of: Callable[[torch.device], CopyStream | None] = stream_of,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._stream_of, self._piece_bytes = stream_of, piece_bytes
        self._streams: dict[torch.device, CopyStream | None] = {}

    def begin(self, pairs: Iterable[Pair]) -> HostCopy:
        """Begin to copy, for each pair (target, source), the source into the target of the same shape and type.

        One of the two is in host memory. A target on the device must not be used before `wait_on_device`.
        """
        copy = HostCopy(self._by_device(pairs))
        copy.queue_all()
        return copy

    def begin_in_pieces(self, pairs: Iterable[Pair]) -> HostCopy:
        """Begin to copy as `begin` does, but leave queueing to `wait`: one piece at a time.

        A tensor that is not contiguous is in one piece, whatever its size.
        """
        limit = self._piece_bytes
        return HostCopy((queue, piece) for queue, together in self._by_device(pairs) for piece in _cut(together, limit))

    def _by_device(self, pairs: Iterable[Pair]) -> Iterator[tuple[Queue | None, list[Pair]]]:
        by_device: dict[torch.device, list[Pair]] = {}
        for target, source in pairs:
            device = target.device if source.device.type == "cpu" else source.device
            by_device.setdefault(device, []).append((target, source.detach()))
        for device, together in by_device.items():
            stream = self._stream(device)
            yield None if stream is None else stream.behind_caller(), together

    def each(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in host memory, by name; the next one is copied while the caller uses the one before.

        A yielded tensor is valid until the next iteration, and so may be those of `tensors`. A tensor that no stream
        copies is yielded itself.
        """
        under_way: list[tuple[str, Tensor, HostCopy]] = []
        for name, tensor in tensors:
            if self._stream(tensor.device) is not None:
                host = host_like(tensor)
                copy = self.begin([(host, tensor)])
                copy.wait_on_device()  # the next tensor may have the same memory
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

    torch keeps freed pinned memory, and reuses it.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def host_like(source: Tensor) -> Tensor:
    """Return host memory for a copy of `source`, not set."""
    return host_buffer(source.shape, source.dtype, source.device)


def upload(arrays: Mapping[str, NDArray[np.int64]], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays as tensors on `device`. All are moved in one copy, which is asynchronous for a GPU."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    sizes = [array.size for array in arrays.values()]
    host = host_buffer([sum(sizes)], torch.int64, device)
    np.concatenate([array.reshape(-1) for array in arrays.values()], out=host.numpy())
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}


def copy_pairs(pairs: Sequence[Pair]) -> None:
    """Copy each source into its target, on the current stream."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def copy_rate(device: torch.device) -> float:
    """Measure the rate of copies from `device` to reused host memory, in bytes per second."""
    source = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    host, copies = host_like(source).zero_(), HostCopies()
    began = 0.0
    for _ in range(2):  # the first one makes the stream
        began = perf_counter()
        copies.begin([(host, source)]).wait()
    return _MEASURED_BYTES / (perf_counter() - began)


def pin(memory: Tensor) -> bool:
    """Pin host memory that torch has not allocated, for copies from a GPU.

    `unpin` it before it is unmapped: otherwise CUDA refuses copies to later mappings at the same addresses.

    Returns:
        False if CUDA refuses; copies into the memory are still correct, but the host waits for them.
    """
    with suppress(RuntimeError):
        _register(memory.data_ptr(), memory.nbytes)
        return True
    return False


def unpin(memory: Tensor) -> None:
    """End `pin`, after all copies into the memory have ended."""
    _unregister(memory.data_ptr())


def own_storage(module: nn.Module) -> None:
    """Give each tensor whose storage cannot be emptied a new one: on a CPU, weights that are a memory map of their
    file.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def storages(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.device, torch.UntypedStorage]]:
    """Yield each storage that can be emptied, once. Storages shared with numpy, on a CPU, cannot and need not be."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield tensor.device, storage


def in_pieces(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists whose sizes add up to `limit` at most; a larger item has a separate list."""
    piece: list[T] = []
    total = 0
    for item in items:
        if piece and total + size(item) > limit:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += size(item)
    if piece:
        yield piece


def _ended(copied: tuple[str, Tensor, HostCopy]) -> tuple[str, Tensor]:
    name, host, copy = copied
    copy.wait()
    return name, host


def _cut(pairs: Iterable[Pair], limit: int) -> Iterator[list[Pair]]:
    """Cut `pairs` in order into pieces of `limit` bytes at most; larger tensors are cut as well."""
    parts = (part for pair in pairs for part in _parts(*pair, limit))
    return in_pieces(parts, lambda part: part[1].nbytes, limit)


def _parts(target: Tensor, source: Tensor, limit: int) -> Iterable[Pair]:
    if source.nbytes <= limit or not (target.is_contiguous() and source.is_contiguous()):
        return [(target, source)]
    count = max(1, limit // source.element_size())
    return zip(torch.split(target.view(-1), count), torch.split(source.view(-1), count), strict=True)
