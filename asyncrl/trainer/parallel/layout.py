"""Layout of a role's model over ranks: `d2t2p2`, the grammar of `trainer.parallel` and of every role's separate layout.

    d<N>   N data-parallel ranks; each trains other samples, and the weights are sharded over all of them
    t<N>   every layer's matrices are cut into N tensor slices; the experts of a mixture are dealt to them whole
    p<N>   the layers are cut into N pipeline stages
    c<N>   the tokens of every micro-batch are cut into N parts (context parallel; Ulysses, arXiv 2309.14509); the
           weights are sharded over these ranks too, so `d2c2` holds a quarter of them on each rank, as `d4` does
    r<N>   N replicas of the `d` ranks (hybrid sharding): weights are sharded within a replica and equal in all
           replicas, so `r2d4` are 8 data-parallel ranks that hold a quarter of the weights each

Letters come in any order, each at most once; a missing one is 1. AReaL's `m` is accepted for `t`. `Layout.data` counts
all data-parallel ranks, replicas included; trajectories are distributed by this number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(r"([rdtmpc])([1-9][0-9]{0,3})")
_GRAMMAR = (
    "write d<N> data-parallel ranks, t<N> tensor slices, p<N> pipeline stages, c<N> parts of a micro-batch's tokens "
    "and r<N> replicas of d in any order, each once and 1 to 9999, for example d2 or d2t2p2"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes over which a role's model is spread.

    Attributes:
        data: data-parallel ranks, replicas included.
        tensor, pipeline: tensor slices of a layer, stages of the model.
        replicas: number of complete copies of the weights; divides `data`.
        context: parts that the tokens of a micro-batch are cut into.

    Raises:
        ValueError: an axis is below 1, or `replicas` does not divide `data`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.replicas, self.context) < 1:
            raise ValueError(f"{self!r} has an axis below 1; set trainer.parallel to a layout like d2")
        if self.data % self.replicas:
            raise ValueError(f"{self!r}: {self.data} data-parallel ranks are not a whole number of replicas")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout such as `d2t2p2`.

        Raises:
            ValueError: `text` is not a layout; the message describes the grammar.
        """
        found = _PART.findall(text)
        parts = [(letter.replace("m", "t"), size) for letter, size in found]
        sizes = {letter: int(size) for letter, size in parts}
        if not found or "".join(letter + size for letter, size in found) != text:
            raise ValueError(f"not a layout; {_GRAMMAR}")
        if len(sizes) < len(parts):
            twice = next(letter for letter in sizes if [part[0] for part in parts].count(letter) > 1)
            raise ValueError(f"{twice!r} is there twice; {_GRAMMAR}")
        replicas = sizes.get("r", 1)
        return cls(sizes.get("d", 1) * replicas, sizes.get("t", 1), sizes.get("p", 1), replicas, sizes.get("c", 1))

    @property
    def copy(self) -> int:
        """Ranks of one data-parallel copy: they process the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.copy

    @property
    def shards(self) -> int:
        """Ranks over which the weights of one replica, of each tensor slice and stage, are sharded."""
        return self.data // self.replicas * self.context

    def __str__(self) -> str:
        """Return the layout in the grammar, without axes of size 1; `d1` if all are 1."""
        sizes = {
            "r": self.replicas,
            "d": self.data // self.replicas,
            "c": self.context,
            "t": self.tensor,
            "p": self.pipeline,
        }
        return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the contiguous layers of pipeline `stage` out of `stages`; sizes of stages differ by one at most."""
    return range(stage * layers // stages, (stage + 1) * layers // stages)


def slice_of(size: int, parts: int, index: int) -> range:
    """Return the `index`-th of `parts` slices of a dimension, as torch cuts it: at most ceil(size / parts) each."""
    each = -(-size // parts)
    return range(min(index * each, size), min((index + 1) * each, size))
