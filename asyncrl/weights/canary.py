"""The canary of published weights: a fixed prompt and the trainer's own log-probabilities of it. Torch-free.

`canary.json` lies beside the weights of every published version:

    {"token_ids": [31, 4, 90], "logprobs": [0.0, -3.1, -2.7]}

The tokens are drawn once from the vocabulary and never change; the log-probabilities (nats, temperature 1) are those of
the model that was published. A generation server that has loaded the version scores the same tokens; where it differs,
it serves other weights than were published, or something stale of the weights before.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from asyncrl.weights.manifest import ManifestError

CANARY_FILE = "canary.json"
CANARY_TOKENS = 16
"""Long enough that every layer attends to something, short enough to cost a few milliseconds."""
_SEED = 20_112


class Canary(msgspec.Struct, frozen=True):
    """`logprobs[t]` is log p(token_ids[t] | token_ids[:t]); entry 0 is 0."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def canary_tokens(vocabulary: int, context: int) -> tuple[int, ...]:
    """The fixed prompt of a model with `vocabulary` tokens, at most `CANARY_TOKENS` long and with room for one more
    token in `context`; empty where that leaves nothing to score.
    """
    length = min(CANARY_TOKENS, context - 1)
    draw = random.Random(_SEED)
    return tuple(draw.randrange(vocabulary) for _ in range(length)) if length > 1 else ()


def encode_canary(canary: Canary) -> bytes:
    """The content of `CANARY_FILE`."""
    return msgspec.json.encode(canary)


def read_canary(directory: Path) -> Canary | None:
    """The canary of the weights in `directory`, None where they have none (they are not of a trainer of asyncrl).

    Raises:
        ManifestError: it is not one.
    """
    path = directory / CANARY_FILE
    try:
        canary = msgspec.json.decode(path.read_bytes(), type=Canary)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ManifestError(f"{path} is no canary ({error}); remove {directory}") from error
    if not len(canary.token_ids) == len(canary.logprobs) > 1:
        raise ManifestError(
            f"{path} has {len(canary.token_ids)} tokens and {len(canary.logprobs)} log-probabilities; give as many of "
            f"one as of the other, at least 2; remove {directory}"
        )
    return canary
