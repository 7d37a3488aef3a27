"""What several benchmarks share: their command line, tables, turns, verdicts, the demo's base model.

Nothing here imports torch, so that processes which measure other things stay small; `tiny_models` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.load import load_supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model

T = TypeVar("T")
R = TypeVar("R")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a command line whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class Table:
    """A table in Markdown whose rows are printed as they are measured; the first column is text, the others numbers."""

    def __init__(self, *heads: str) -> None:
        self.row(*heads)
        print(f"|---{'|--:' * (len(heads) - 1)}|", flush=True)

    def row(self, *cells: object) -> None:
        """Print a row."""
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def with_block(text: str, begin: str, end: str, block: str) -> str:
    """Return a page's text with what stands between the lines `begin` and `end` replaced."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{block}{end}{rest.partition(end)[2]}"


def by_turns(variants: Iterable[T], rounds: int, measure: Callable[[T], R]) -> list[list[R]]:
    """Measure `variants` round by round, in one order and then in the other; return the figures of each.

    So a machine whose speed changes from minute to minute disturbs the ratios of a round little.
    """
    order = [*variants]
    found: dict[T, list[R]] = {variant: [] for variant in order}
    for number in range(rounds):
        for variant in order[:: -1 if number % 2 else 1]:
            found[variant].append(measure(variant))
    return [*found.values()]


def verdict(value: float, target: float, *, at_least: bool = False) -> str:
    """Return `met` or `MISSED`."""
    return "met" if (value >= target if at_least else value <= target) else "MISSED"


def sizes_of(
    kind: str, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any
) -> dict[str, Any]:
    """A model's config.json, as far as it decides sizes."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    return {"model_type": kind, **sizes, "tie_word_embeddings": False, **more}


def demo_model() -> Path:
    """Return the folder of the demo's base model; it is made first if there is none."""
    return Path(ensure_base_model(load_supervised("arithmetic_base")))
