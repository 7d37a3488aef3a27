"""Layout of a message of trajectories: the dtypes of its arrays, and the header's entry for each trajectory."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from asyncrl.api.trajectory import MAX_GROUP_LENGTH, MAX_GROUPS

KIND = "trajectories"
MAX_ID_LENGTH = 256
_REQUIRED: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(np.int32) for name in ("prompts", "tokens", "versions", "episodes")},
    **{name: np.dtype(np.int64) for name in ("lengths", "sizes", "prompt_lengths")},
    **{name: np.dtype(np.uint8) for name in ("loss_mask", "truncated")},
    "behave_logprobs": np.dtype(np.float32),
    "rewards": np.dtype(np.float64),
}
_OPTIONAL: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(np.float32) for name in ("token_rewards", "token_columns")},
    **{name: np.dtype(np.uint8) for name in ("groups", "routing", "pictures")},
}
PAIRS = {name: f"{name}_sizes" for name in _OPTIONAL}
"""Optional arrays, and for each the array with the size of every trajectory's share of it. Both are absent if no
trajectory has any.
"""
DTYPES = _REQUIRED | _OPTIONAL | dict.fromkeys(PAIRS.values(), np.dtype(np.int64))
REQUIRED = _REQUIRED.keys()
BY_TOKEN = ("tokens", "loss_mask", "behave_logprobs", "versions")
MAX_ROUTED_LAYERS, MAX_ROUTED_EXPERTS = 1024, 64
"""Bounds of a routing in a header, layers and experts per token; far above any model."""
ROUTING_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
_Group: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_GROUP_LENGTH)]
_Named: TypeAlias = dict[str, list[float | None]]


class RoutingHeader(msgspec.Struct, frozen=True):
    """Shape of a trajectory's routing; `width` is the number of bytes of an expert's index."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_LAYERS)]
    per_token: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_EXPERTS)]
    width: Literal[1, 2]

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return self.layers * self.per_token * self.width


_NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Span: TypeAlias = tuple[_NotNegative, Annotated[int, msgspec.Meta(ge=1)], _NotNegative]
"""A picture in a prompt or a sample's rest: position and length of its span, and its number in `contents`."""


class PicturesHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pictures of a trajectory; the bytes of `contents` follow one another in the message's array."""

    contents: list[tuple[str, _NotNegative]]
    """SHA-256 and size in bytes of each picture, once."""
    prompt: list[Span] = []
    samples: list[list[Span]] = []
    """Spans of each sample, at positions after the prompt; empty if all are the prompt's."""


class TrajectoryHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trajectory's entry in the header. Reward parts and metrics are lists by name with one value per sample, None if
    absent.
    """

    rollout_id: _Id
    prompt_id: _Id
    order: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    metrics: dict[str, float]
    reward_parts: _Named = {}  # msgspec makes a new one for each header
    sample_metrics: _Named = {}
    routing: RoutingHeader | None = None
    token_columns: list[str] = []
    """Names of the token columns, in their order in the array."""
    pictures: PicturesHeader | None = None
    groups: Annotated[list[_Group], msgspec.Meta(max_length=MAX_GROUPS)] = []
    """Names of the comparison groups. A sample refers to its group by its position here."""
