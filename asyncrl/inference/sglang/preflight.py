"""Checks before anything is sent to a server that would die of it.

A weight of another shape, or a token id outside the vocabulary, ends an SGLang server. Both are found out here from the
safetensors headers and the model's config, without torch and without reading a weight.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Signature = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name to (safetensors dtype, shape)."""

_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors' own reader
_SHOWN = 5


class IncompatibleWeights(ValueError):
    """The new weights do not fit the model that the server holds."""


class UnknownToken(ValueError):
    """A prompt holds a token id outside the vocabulary."""


def read_signature(model_dir: Path) -> Signature:
    """Names, dtypes and shapes of every tensor in the safetensors files of `model_dir`.

    Raises:
        IncompatibleWeights: there is no safetensors file, or one is torn.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise IncompatibleWeights(f"{model_dir} holds no *.safetensors file")
    signature: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        signature |= _read_header(file)
    return signature


def check_weights(serving: Signature, new: Signature, *, tied: bool) -> None:
    """Check that `new` replaces `serving` tensor by tensor. The dtype may differ: a server converts it.

    Args:
        serving: of the model that the server started with.
        new: of the weights to be loaded.
        tied: the model shares input and output embeddings, so that `lm_head.weight` may be there or not.

    Raises:
        IncompatibleWeights: a tensor is missing, unknown or of another shape; the message names the first few.
    """
    optional = {"lm_head.weight"} if tied else set()
    faults = [f"{name} is missing" for name in serving if name not in new and name not in optional]
    faults += [f"{name} is unknown" for name in new if name not in serving and name not in optional]
    faults += [
        f"{name} has shape {list(shape)}, the server's has {list(serving[name][1])}"
        for name, (_, shape) in new.items()
        if name in serving and shape != serving[name][1]
    ]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise IncompatibleWeights(f"weights do not fit the served model: {'; '.join(faults[:_SHOWN])}{more}")


def check_tokens(prompts: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Check that every token id of every prompt is within the vocabulary.

    Raises:
        UnknownToken: one is not; the message names it.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) and not (min(prompt) >= 0 and max(prompt) < vocab_size):
            token = next(token for token in prompt if not 0 <= token < vocab_size)
            raise UnknownToken(f"prompt {index} holds token id {token}, but the vocabulary has {vocab_size} tokens")


def _read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_HEADER_LENGTH.size)
        length = _HEADER_LENGTH.unpack(prefix)[0] if len(prefix) == _HEADER_LENGTH.size else _MAX_HEADER_BYTES + 1
        if length > min(size, _MAX_HEADER_BYTES):
            raise IncompatibleWeights(f"{file} is torn: no header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise IncompatibleWeights(f"{file} is torn: its header is not JSON") from error
    header.pop("__metadata__", None)
    data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = _HEADER_LENGTH.size + length + data_bytes
    if size != expected:
        raise IncompatibleWeights(f"{file} is torn: it has {size} bytes, by its header {expected}")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
