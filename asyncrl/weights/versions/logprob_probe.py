"""The probe of published weights: fixed prompts and the trainer's own log-probabilities of them. Torch-free.

`logprob_probe.json` lies beside the weights of every published version:

    {"sequences": [{"token_ids": [31, 4, 90], "logprobs": [0.0, -3.1, -2.7]}, {"token_ids": [...], ...}]}

The tokens are drawn once from the vocabulary and never change; the log-probabilities (nats, temperature 1) are those of
the model that was published, computed as training computes them: all sequences in one micro-batch. A generation server
that has loaded the version scores the same sequences, as requests of their own; where it differs, it serves other
weights than were published, or something stale of the weights before, or one of the two does not keep sequences apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.weights.versions.manifest import ManifestError

PROBE_FILE = "logprob_probe.json"
PROBE_LENGTHS = (16, 11, 6)
"""Tokens of the sequences: long enough that every layer attends to something, short enough to cost a few milliseconds,
several because training computes several at once."""
_SEED = 20_112


class ProbeSequence(msgspec.Struct, frozen=True):
    """`logprobs[t]` is log p(token_ids[t] | token_ids[:t]); entry 0 is 0."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class LogprobProbe(msgspec.Struct, frozen=True):
    """Sequences that were scored together; at least one."""

    sequences: tuple[ProbeSequence, ...]

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> LogprobProbe:
        """The probe of sequences and their log-probabilities."""
        pairs = zip(token_ids, logprobs, strict=True)
        return cls(tuple(ProbeSequence(tuple(tokens), tuple(scores)) for tokens, scores in pairs))


def probe_tokens(vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """The fixed prompts of a model with `vocabulary` tokens, each with room for one more token in `context`; none where
    that leaves nothing to score.
    """
    draw = random.Random(_SEED)
    lengths = [min(length, context - 1) for length in PROBE_LENGTHS]
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths if length > 1]


def encode_probe(probe: LogprobProbe) -> bytes:
    """The content of `PROBE_FILE`."""
    return msgspec.json.encode(probe)


def read_probe(directory: Path) -> LogprobProbe | None:
    """The probe of the weights in `directory`, None where they have none (they are not of a trainer of asyncrl).

    Raises:
        ManifestError: it is not one.
    """
    path = directory / PROBE_FILE
    try:
        probe = msgspec.json.decode(path.read_bytes(), type=LogprobProbe)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ManifestError(f"{path} is not a probe ({error}); remove {directory}") from error
    lengths = [(len(each.token_ids), len(each.logprobs)) for each in probe.sequences]
    if not lengths or not all(tokens == logprobs > 1 for tokens, logprobs in lengths):
        raise ManifestError(
            f"{path} has sequences of {[tokens for tokens, _ in lengths]} tokens and {[n for _, n in lengths]} "
            f"log-probabilities; give at least one, as many of one as of the other, at least 2; remove {directory}"
        )
    return probe
