"""The probe of published weights: fixed prompts and the trainer's own log-probabilities of them. Torch-free.

`logprob_probe.json` is beside the weights of every published version:

    {"sequences": [{"token_ids": [31, 4, 90], "logprobs": [0.0, -3.1, -2.7]}, {"token_ids": [...], ...}]}

A model that takes pictures has one more sequence, with a picture of noise, its bytes and its position. It detects a
server whose vision tower is stale.

The tokens are drawn once from the vocabulary and never change. The log-probabilities (nats, temperature 1) are those of
the published model, computed as training computes them: all sequences in one micro-batch. A generation server that has
loaded the version scores the same sequences, as separate requests. A difference has one of three
causes: the server has other weights than the published ones; it has stale parts of earlier weights; or one of the two
does not keep sequences apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.comm.typed import decode_json
from asyncrl.weights.manifest import ManifestError

PROBE_FILE = "logprob_probe.json"
PROBE_LENGTHS = (16, 11, 6)
"""Tokens of the sequences: long enough that every layer attends to something, short enough to cost a few milliseconds,
several because training computes several at once."""
PICTURE_SIDE = 32
"""Pixels of a side of the picture."""
_AROUND = 6
"""Tokens before the picture, and after it."""
_SEED = 20_112


class ProbePicture(msgspec.Struct, frozen=True):
    """A picture at `length` tokens from `position` on, with its encoded bytes."""

    position: int
    length: int
    data: bytes

    @property
    def placed(self) -> PlacedPicture:
        """Return the picture in the form that requests use.

        Raises:
            PictureError: the bytes are not a picture.
        """
        return PlacedPicture(self.position, self.length, Picture.from_bytes(self.data))


class ProbeSequence(msgspec.Struct, frozen=True):
    """`logprobs[t]` is log p(token_ids[t] | token_ids[:t]); entry 0 is 0."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    picture: ProbePicture | None = None

    @property
    def start(self) -> int:
        """Position after which tokens are compared; earlier ones may come from a cache."""
        return len(self.token_ids) // 2 if self.picture is None else self.picture.position + self.picture.length


class LogprobProbe(msgspec.Struct, frozen=True):
    """Sequences that were scored together; at least one."""

    sequences: tuple[ProbeSequence, ...]

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        picture: PlacedPicture | None = None,
    ) -> LogprobProbe:
        """Return the probe of sequences and their log-probabilities; `picture` is in the last sequence."""
        pairs = zip(token_ids, logprobs, strict=True)
        made = [ProbeSequence(tuple(tokens), tuple(scores)) for tokens, scores in pairs]
        if picture is not None:
            shown = ProbePicture(picture.position, picture.length, picture.picture.data)
            made[-1] = msgspec.structs.replace(made[-1], picture=shown)
        return cls(tuple(made))


def probe_tokens(vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """Return the fixed prompts of a model with `vocabulary` tokens, each with room for one more token in `context`.

    Empty if that leaves nothing to score.
    """
    draw = random.Random(_SEED)
    lengths = [min(length, context - 1) for length in PROBE_LENGTHS]
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths if length > 1]


def probe_picture() -> Picture:
    """Return the fixed picture of noise."""
    pixels = random.Random(_SEED).randbytes(3 * PICTURE_SIDE * PICTURE_SIDE)
    return Picture.from_array(np.frombuffer(pixels, np.uint8).reshape(PICTURE_SIDE, PICTURE_SIDE, 3))


def with_picture(
    vocabulary: int, context: int, placeholders: Sequence[int], picture: Picture
) -> tuple[tuple[int, ...], PlacedPicture] | None:
    """Return the fixed prompt with `picture` at its `placeholders`; None if it does not fit in `context`."""
    if len(placeholders) + 2 * _AROUND >= context:
        return None
    draw = random.Random(_SEED)
    before, after = (tuple(draw.randrange(vocabulary) for _ in range(_AROUND)) for _ in range(2))
    return (*before, *placeholders, *after), PlacedPicture(_AROUND, len(placeholders), picture)


def encode_probe(probe: LogprobProbe) -> bytes:
    """Return the content of `PROBE_FILE`."""
    return msgspec.json.encode(probe)


def read_probe(directory: Path) -> LogprobProbe | None:
    """Return the probe of the weights in `directory`; None if they have none because another program wrote them.

    Raises:
        ManifestError: the file is not a probe.
    """
    path = directory / PROBE_FILE
    try:
        probe = decode_json(path.read_bytes(), LogprobProbe)
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
    if any(each.start >= len(each.token_ids) or each.start < 1 for each in probe.sequences):
        raise ManifestError(f"{path} has a picture outside of its sequence; remove {directory}")
    return probe
