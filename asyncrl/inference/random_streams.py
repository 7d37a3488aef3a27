"""Random streams of samples: the embedded engine draws from them, and clients seed requests with them.

A sample's stream is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014):
number `t` of the stream `seed` is `mix(seed + (t + 1) * GAMMA)` modulo 2^64. It is a function of (seed, t) alone. So it
does not depend on the rest of the batch, and a sample that was interrupted after k tokens continues the same stream
from t = k.
"""

from __future__ import annotations

import secrets

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SEED_BITS = 63
"""Bits of a seed, which is sent as a JSON integer and stored in signed 64-bit tensors."""


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every input bit changes half the output bits."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` (0, 1, ...) of a request with base seed `seed`; in `[0, 2**63)`."""
    return mix(mix(seed) + (index + 1) * GAMMA) >> (64 - SEED_BITS)


def fresh_seed() -> int:
    """Return a seed from the system's entropy, for a request without one."""
    return secrets.randbits(SEED_BITS)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws output token `position` of the stream `seed`; tensors give the same."""
    return float(mix(seed + (position + 1) * GAMMA) >> 11) * 2.0**-53
