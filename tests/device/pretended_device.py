"""A second device on a CPU build of torch, named `pretended`: real values, and a GPU's rules.

It is torch's python back end for devices of others (PrivateUse1). A tensor on it stands for a CPU tensor, and every
operator runs on those. An operator that gets tensors of both devices is refused, as CUDA refuses it; what would make
the host wait for a GPU is counted by the line of asyncrl that asked for it (`Watch`). What only CUDA has (streams,
pinned memory, graphs, NCCL) is not pretended.

Importing this module registers the device for the whole process, which changes what FSDP2 does there: `make test` runs
these tests in processes of their own.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import asyncrl

PACKAGE = str(Path(asyncrl.__file__).parent)
WAITING_OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "_unique2",
    "is_nonzero",
    "equal.default",
    "repeat_interleave.Tensor",
)
"""Operators whose result's size or value the host needs before it can go on."""
MAY_MIX = ("copy_", "_to_copy", "_copy_from", "set_", "index.Tensor")
"""Operators that CUDA lets take tensors of both devices."""


class MixedDevices(RuntimeError):
    """An operator got tensors of both devices."""


@dataclass
class Watch:
    """What ran on the device: operators by name, and waits of the host by (reason, line of asyncrl)."""

    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    at_wait: Callable[[], None] = lambda: None
    """Called at each wait."""

    def lines(self) -> str:
        """The waits, one a line, most frequent first."""
        return "\n".join(f"{count:5} {reason:24} {line}" for (reason, line), count in self.waits.most_common())


_watch: Watch | None = None


@contextmanager
def watched() -> Iterator[Watch]:
    """Count what runs on the device in the meantime."""
    global _watch
    _watch = watch = Watch()
    try:
        yield watch
    finally:
        _watch = None


class _Module(_DummyBackendModule):
    """`torch.pretended`."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None:
        pass


_setup_privateuseone_for_python_backend("pretended", backend_module=_Module())
DEVICE = torch.device("pretended", 0)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)  # whose kernel asks for no memory behind a storage
_as_strided = torch.ops.aten.as_strided.default

_host_of: dict[int, Tensor] = {}
"""The CPU tensor behind each storage of the device, by the storage's address: objects do not survive autograd."""
_device_of: dict[tuple[int, torch.dtype], Tensor] = {}
"""The reverse, by the CPU storage's address."""


def _pretend(host: Tensor) -> Tensor:
    """A tensor on the device with the values of `host`, sharing a storage with all other views of it."""
    storage = host.untyped_storage()
    key, size = (storage._cdata, host.dtype), storage.nbytes() // host.element_size()
    base = _device_of.get(key)
    if base is None or base.numel() < size:
        base = _device_of[key] = torch._C._acc.create_empty_tensor((size,), host.dtype)
        whole = torch.empty(0, dtype=host.dtype).set_(storage, 0, (size,), (1,))
        _host_of[base.untyped_storage()._cdata] = whole
    return _as_strided.redispatch(_META, base, host.shape, host.stride(), host.storage_offset())


def _real(tensor: Tensor) -> Tensor:
    """The CPU tensor that `tensor` stands for."""
    host = _host_of.get(tensor.untyped_storage()._cdata)
    if host is None:
        raise MixedDevices(f"an operator got tensors of both devices at {_line()}")
    if host.dtype != tensor.dtype:
        host = torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage())
    return _as_strided.redispatch(_CPU, host, tensor.shape, tensor.stride(), tensor.storage_offset())


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "pretended"


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "outside asyncrl"
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path[len(PACKAGE) + 1 :]}:{line} {linecache.getline(path, line).strip()[:90]}"


def _waits(reason: str) -> None:
    if _watch is not None:
        _watch.waits[reason, _line()] += 1
        _watch.at_wait()


def _leaves(value: Any) -> Iterator[Any]:
    """What an operator's arguments hold. Torch's own trees know many more kinds of them, and take most of the time."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with `function` of each of them."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        return type(value)([_mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


@cache
def _takes(operator: Any) -> dict[str, str]:
    """The types of an operator's arguments, by name."""
    return {argument.name: str(argument.type) for argument in operator._schema.arguments}


def _any_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = str(operator).removeprefix("aten.")
    leaves = list(_leaves((args, kwargs)))
    here = [each for each in leaves if _on_device(each)]
    elsewhere = [each for each in leaves if isinstance(each, Tensor) and not _on_device(each) and each.dim()]
    if here and elsewhere and not name.startswith(MAY_MIX):
        raise MixedDevices(f"{name} got tensors of both devices at {_line()}")
    if _watch is not None:
        _watch.operators[name] += 1
        if name.startswith(WAITING_OPERATORS):
            _waits(name)
        if name.startswith(("index.Tensor", "index_put", "_index_put_impl")):
            indices = [each for each in args[1] if each is not None]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                _waits("boolean index")
            if here and not all(map(_on_device, indices)):
                _waits("index on the host")
    takes = _takes(operator)
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    real_args, real_kwargs = _mapped(lambda each: _real(each) if _on_device(each) else each, (args, kwargs))
    kinds = list(takes.values())
    real_args = tuple(  # a number that the dispatcher had wrapped comes as a number
        torch.tensor(each) if isinstance(each, int | float) and kinds[position : position + 1] == ["Tensor"] else each
        for position, each in enumerate(real_args)
    )
    if device is not None and "device" in takes:
        real_kwargs["device"] = "cpu"
    result = operator(*real_args, **real_kwargs)
    given = {}
    for ours, theirs in zip(leaves, _leaves((real_args, real_kwargs)), strict=False):
        if _on_device(ours):
            given[id(theirs)] = ours
            if tuple(theirs.shape) != tuple(ours.shape):  # an `out` that the operator has resized
                ours.data = _pretend(theirs)

    def back(each: Any) -> Any:
        return given.get(id(each), _pretend(each)) if isinstance(each, Tensor) else each

    return _mapped(back, result)


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_any_operator, "PrivateUse1")
_own = torch.library.Library("aten", "IMPL")


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _own.impl(name, function, "PrivateUse1")
        return function

    return register


def _crosses(to_device: bool, non_blocking: bool) -> None:
    if not non_blocking:
        _waits("copy to the device" if to_device else "copy to the host")


@_kernel("empty.memory_format")
def _empty(size: Any, dtype: torch.dtype | None = None, *_: Any, **__: Any) -> Tensor:
    return _pretend(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


@_kernel("empty_strided")
def _empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, *_: Any, **__: Any) -> Tensor:
    return _pretend(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


@_kernel("_to_copy")
def _to_copy(
    tensor: Tensor,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    here = _on_device(tensor)
    there = torch.device(device).type == "pretended" if device is not None else here
    if here != there:
        _crosses(there, non_blocking)
    real = _real(tensor) if here else tensor
    copied = torch.ops.aten._to_copy(real, dtype=dtype)
    copied = copied.clone() if copied is real else copied
    return _pretend(copied) if there else copied


@_kernel("copy_")
def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    here, there = _on_device(source), _on_device(target)
    if here != there:
        _crosses(there, non_blocking)
    (_real(target) if there else target).copy_(_real(source) if here else source)
    return target


@_kernel("_copy_from")
def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_(target, source, non_blocking)


@_kernel("as_strided")
def _strided(tensor: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    return _as_strided.redispatch(_META, tensor, size, stride, offset)


@_kernel("set_.source_Storage_storage_offset")
def _set_(tensor: Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_META, tensor, storage, offset, size, stride)


@_kernel("view")
def _view(tensor: Tensor, size: Any) -> Tensor:
    return _pretend(_real(tensor).view(size))


@_kernel("_fused_rms_norm")
def _fused_rms_norm(tensor: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """One operator, as on a GPU. Without gradients: on a CPU build torch has no backward pass of it."""
    if _watch is not None:
        _watch.operators["_fused_rms_norm"] += 1
    out, scale = torch.ops.aten._fused_rms_norm(_real(tensor), shape, None if weight is None else _real(weight), eps)
    return _pretend(out), _pretend(scale)


@_kernel("convolution_overrideable")
def _convolution(tensor: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """What torch asks a device of others for, in place of its own choice of a kernel."""
    if _watch is not None:
        _watch.operators["convolution"] += 1
    return _pretend(torch.convolution(_real(tensor), _real(weight), None if bias is None else _real(bias), *settings))


@_kernel("convolution_backward_overrideable")
def _convolution_backward(
    grad: Tensor,
    tensor: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Any,
) -> tuple[Tensor | None, ...]:
    settings = (stride, padding, dilation, transposed, output_padding, groups, wanted)
    sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    grads = torch.ops.aten.convolution_backward(_real(grad), _real(tensor), _real(weight), sizes, *settings)
    return tuple(None if each is None else _pretend(each) for each in grads)


@_kernel("histc")
def _histc(tensor: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of whole numbers too, as on a GPU."""
    if _watch is not None:
        _watch.operators["histc"] += 1
    return _pretend(torch.histc(_real(tensor).float(), bins, min, max).to(tensor.dtype))


@_kernel("_grouped_mm")
def _grouped_mm(*given: Any, **named: Any) -> Any:
    """One operator that leaves the sizes of the groups on the device, as a GPU's kernel of bf16 does."""
    return _any_operator(torch.ops.aten._grouped_mm.default, *given, **named)


def _of_host(kind: type, name: str, host_of: Callable[[Any], Any]) -> None:
    """Let `kind.name` of the device's objects be that of the CPU's: torch itself knows no memory behind them."""
    original = getattr(kind, name)

    def method(self: Any, *given: Any) -> Any:
        return original(host_of(self) if self.device.type == "pretended" else self, *given)

    setattr(kind, name, method)


for _name in ("nbytes", "resize_"):
    _of_host(torch.UntypedStorage, _name, lambda storage: _host_of[storage._cdata].untyped_storage())
_of_host(torch.Tensor, "data_ptr", _real)
torch.__future__.set_swap_module_params_on_conversion(True)  # as on a GPU, a weight that is tied stays so when it moves
