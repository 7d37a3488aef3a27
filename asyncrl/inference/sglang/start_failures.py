"""Causes of a failed start in the log of an SGLang server, and their fixes."""

from __future__ import annotations

from collections.abc import Sequence

_TOO_LITTLE_IS_FREE = (
    ("cuda out of memory", "cuda error: out of memory", "cuda_error_out_of_memory", "outofmemoryerror"),
    "too little memory is free on its GPU: lower generation.sglang.args.mem_fraction_static, the part for weights and "
    "KV cache; set a larger generation.sglang.tensor_parallel; or give the server a GPU of its own",
)
_NO_ROOM_FOR_THE_CACHE = (
    ("not enough memory. please try to increase --mem-fraction-static",),
    "its part of the GPU's memory holds the weights but no KV cache: raise generation.sglang.args.mem_fraction_static, "
    "or set a larger generation.sglang.tensor_parallel",
)


def advice(lines: Sequence[str]) -> str:
    """Return what to do about the cause that `lines` of the log show; empty if none is known."""
    log = "\n".join(lines).lower()
    for texts, what_to_do in (_NO_ROOM_FOR_THE_CACHE, _TOO_LITTLE_IS_FREE):
        if any(text in log for text in texts):
            return what_to_do
    return ""


def explained(reason: str, lines: Sequence[str], first_error: str) -> str:
    """Return `reason` with the log's last lines, its first error and what to do, which come last: logs are read so."""
    message = [f"{reason}; the end of its log:", *lines]
    if first_error:
        message.append(f"the first error in its log: {first_error}")
    if what_to_do := advice([*lines, first_error]):
        message.append(what_to_do)
    return "\n".join(message)
