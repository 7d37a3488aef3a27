"""Show the training step's graph of a checked experiment."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from asyncrl.config.load import Config
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.drawing import to_svg, to_text
from asyncrl.trainer.supervised.settings import SFTConfig


def show_graph(config: Config, target: str) -> int:
    """Print the graph, or write it to the file `target` as SVG; returns the exit code."""
    if isinstance(config, SFTConfig):
        print("error: a supervised experiment has no graph", file=sys.stderr)
        return 1
    graph = load_graph(config)
    if target == "-":
        Console(highlight=False, markup=False, soft_wrap=True).print(to_text(graph))
    else:
        Path(target).write_text(to_svg(graph))
    return 0
