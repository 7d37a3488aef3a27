"""Pictures that draw themselves, for `vlm_shapes`: one shape on white, and a question that only the picture answers.

A picture of 16 x 16 pixels has four cells of 8 x 8, and in one of them a red, green or blue disc or square. The answer
is the number of the cell, 1 to 4 row by row, and four more if the shape is red. The places within a cell, the
forms and the shades make 864 pictures, of which a hash holds out every fourth: no process ever trains on those.

A model that does not look does best with one answer of 1 to 4, which is right once in six.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

from PIL import Image, ImageDraw

QUESTION = "red?"
CELL, SIDE = 8, 6
"""Pixels of a side: of a cell, and of the shape in it."""
HELD_OUT_SHARE = 4


class Shape(NamedTuple):
    """A shape: its cell (0-3), pixels from the corner of the cell, colour (0: red, 1: green, 2: blue), form, shade."""

    cell: int
    right: int
    down: int
    colour: int
    form: Literal["ellipse", "rectangle"]
    shade: int

    @property
    def answer(self) -> str:
        """The digit that the model has to say."""
        return str(1 + self.cell + 4 * (self.colour == 0))


SHAPES: Sequence[Shape] = tuple(
    itertools.starmap(
        Shape, itertools.product(range(4), range(3), range(3), range(3), ("ellipse", "rectangle"), (255, 235, 215, 195))
    )
)


def drawn(shape: Shape) -> Image.Image:
    """The picture of a shape."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL), "white")
    x, y = shape.cell % 2 * CELL + shape.right, shape.cell // 2 * CELL + shape.down
    fill = [0, 0, 0]
    fill[shape.colour] = shape.shade
    getattr(ImageDraw.Draw(image), shape.form)([x, y, x + SIDE - 1, y + SIDE - 1], fill=tuple(fill))
    return image


def held_out(shape: Shape) -> bool:
    """True if the picture of `shape` is for evaluation alone."""
    return crc32(repr(tuple(shape)).encode()) % HELD_OUT_SHARE == 0


class Shapes:
    """Every picture of one split once, in an order of its own.

    Args:
        split: `train` or `held_out`; no picture is in both.
        seed: another seed gives another order.
        blind: show each question the picture of another row, drawn by chance, for the control: the pictures are the
            same, and none of them tells the answer.

    Raises:
        ValueError: there is no such split.
    """

    def __init__(self, *, split: str = "train", seed: int = 0, blind: bool = False) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"dataset split is {split!r}: choose 'train' or 'held_out'")
        self.shapes = [shape for shape in SHAPES if held_out(shape) == (split == "held_out")]
        draw = random.Random(f"{seed}/{split}")
        draw.shuffle(self.shapes)
        self.shown = draw.sample(self.shapes, len(self.shapes)) if blind else self.shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def row(self, index: int) -> dict[str, Any]:
        """The question, its picture and the answer."""
        return {"prompt": QUESTION, "images": [drawn(self.shown[index])], "answer": self.shapes[index].answer}
