"""A robot that draws itself, for `embodied_srpo`: wipe three red stains off a table.

The table has 3 x 3 cells of 8 x 8 pixels. Actions are the words left, right, up, down, and `.`, which wipes the cell
under the gripper. Success is a clean table, within twelve actions; nothing else is rewarded. A picture is a function of
the state, so equal states are one picture.

Of the 504 layouts, a hash holds out every fourth for evaluation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from asyncrl.api import Environment, StepResult

CELLS, PIXELS, STAINS, MOVES = 3, 8, 3, 12
LEFT, RIGHT, UP, DOWN, WIPE = WORDS = ("left", "right", "up", "down", ".")
INSTRUCTION = "wipe"
HELD_OUT_SHARE = 4
STEPS = {LEFT: (-1, 0), RIGHT: (1, 0), UP: (0, -1), DOWN: (0, 1)}


@dataclass(frozen=True, slots=True)
class State:
    """Cells of the gripper and of the stains, 0-8 row by row."""

    gripper: int
    stains: frozenset[int]

    @property
    def done(self) -> bool:
        """True if the table is clean."""
        return not self.stains

    def after(self, action: str) -> State:
        """The state after `action`; a word that is no action changes nothing."""
        if action == WIPE:
            return replace(self, stains=self.stains - {self.gripper})
        dx, dy = STEPS.get(action, (0, 0))
        x, y = (min(max(at + by, 0), CELLS - 1) for at, by in ((self.gripper % CELLS, dx), (self.gripper // CELLS, dy)))
        return replace(self, gripper=y * CELLS + x)

    @property
    def progress(self) -> float:
        """The share of the stains that is gone."""
        return 1 - len(self.stains) / STAINS

    @property
    def best(self) -> str:
        """The action of somebody who knows: to the nearest stain, sideways first."""
        target = min(self.stains, key=lambda stain: (_between(self.gripper, stain), stain), default=self.gripper)
        dx, dy = target % CELLS - self.gripper % CELLS, target // CELLS - self.gripper // CELLS
        if dx:
            return RIGHT if dx > 0 else LEFT
        if dy:
            return DOWN if dy > 0 else UP
        return WIPE

    @property
    def frame(self) -> NDArray[np.uint8]:
        """`[24, 24, 3]`: stains red, the gripper blue and smaller, so that a stain below it shows."""
        image = np.full((CELLS * PIXELS, CELLS * PIXELS, 3), 255, np.uint8)
        for cell, inner, colour in (
            *((stain, 1, (220, 0, 0)) for stain in self.stains),
            (self.gripper, 3, (0, 0, 255)),
        ):
            x, y = cell % CELLS * PIXELS, cell // CELLS * PIXELS
            image[y + inner : y + PIXELS - inner, x + inner : x + PIXELS - inner] = colour
        return image


def _between(a: int, b: int) -> int:
    return abs(a % CELLS - b % CELLS) + abs(a // CELLS - b // CELLS)


LAYOUTS = tuple(
    State(gripper, frozenset(stains))
    for gripper in range(CELLS * CELLS)
    for stains in itertools.combinations(sorted({*range(CELLS * CELLS)} - {gripper}), STAINS)
)


def held_out(number: int) -> bool:
    """True if layout `number` is for evaluation alone."""
    return crc32(f"layout {number}".encode()) % HELD_OUT_SHARE == 0


class Table(Environment):
    """One episode on the layout of the row."""

    state: State
    moves: int

    def __init__(self, *, reward: Any = None) -> None:
        """The task has its own reward."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], Mapping[str, Any]]:
        """Begin; `options["data"]["layout"]` is the layout."""
        assert options is not None
        self.state, self.moves = LAYOUTS[options["data"]["layout"]], 0
        return self.state.frame, {}

    async def step(self, action: Any) -> StepResult:
        """Do `action`; the info has success and progress."""
        self.state, self.moves = self.state.after(str(action)), self.moves + 1
        done = self.state.done
        info = {"success": done, "progress": self.state.progress}
        return self.state.frame, float(done), done, self.moves >= MOVES, info


class Layouts:
    """Every layout of one split once.

    Args:
        split: `train` or `held_out`; no layout is in both.
        seed: another seed gives another order.

    Raises:
        ValueError: there is no such split.
    """

    def __init__(self, *, split: str = "train", seed: int = 0) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"dataset split is {split!r}: choose 'train' or 'held_out'")
        self.numbers = [number for number in range(len(LAYOUTS)) if held_out(number) == (split == "held_out")]
        random.Random(f"{seed}/{split}").shuffle(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, index: int) -> dict[str, Any]:
        """The instruction, the layout, and the task, which is the same for all layouts."""
        return {"prompt": INSTRUCTION, "layout": self.numbers[index], "task": "wipe"}


def true_progress(group: Any) -> list[float]:
    """SRPO's reward with the true progress in the encoder's place: what any encoder could reach at best."""
    return [0.0 if each.metrics["success"] else 0.6 * max(each.metrics["progress"], 0.0) for each in group]
