"""Gain of asynchronous training on hundreds of devices: the control plane's real code in virtual time.

    python benchmarks/simulate.py [--tables splits512 eta64 ...] [--quick]

Speed-ups are against the fastest baseline, which come first in a table and have none, else against its first row.
*prefilled again* is of the generated tokens, *in vain* the part of them that is not trained, *long* the part of the
trained answers with 16,384 tokens or more. `simulator/__init__.py` and `simulator/simulation.py` have what is real.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

from common import Table, parser
from simulator.scenarios import TABLES, Cell
from simulator.setup import Outcome
from simulator.simulation import Stalled, simulate


def simulated(cells: Iterable[Cell]) -> None:
    """Print the table of these runs.

    Raises:
        SystemExit: a step of one took longer than allowed.
    """
    table, baseline, faults = None, 0.0, []
    for cell in cells:
        try:
            found = simulate(cell.setup)
        except Stalled as stalled:
            raise SystemExit(f"{cell.table}: {cell.label}: {stalled}") from stalled
        figures = _figures(cell, found, baseline)
        if cell.baseline or not baseline:
            baseline = max(baseline, found.trained_per_s)
        table = table or Table("run", *figures)
        table.row(cell.label, *figures.values())
        faults += [f"- {cell.label}: {fault}" for fault in found.faults]
    print(*faults, sep="\n", flush=True)


def _figures(cell: Cell, found: Outcome, baseline: float) -> dict[str, str]:
    answer = found.trained_per_s * found.step_s / (cell.setup.batch * cell.setup.group)
    return {
        "trained tokens/s": f"{found.trained_per_s / 1e3:.0f} k",
        "speed-up": f"{found.trained_per_s / baseline:.2f}" if baseline and not cell.baseline else "",
        "step": f"{found.step_s:.0f} s",
        "generation idle": f"{found.generation_idle:.0%}",
        "training idle": f"{found.training_idle:.0%}",
        "age, mean (max)": f"{found.staleness_mean:.2f} ({found.staleness_max})",
        "prefilled again": f"{found.interrupted:.2f}",
        "in vain": f"{max(0.0, 1 - found.trained_per_s / found.tokens_per_s):.0%}",
        "answer": f"{answer:,.0f}",
        "long": f"{found.long_share:.1%}",
    }


def main() -> None:
    """Simulate, and print the tables."""
    command = parser(__doc__)
    command.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="only these")
    command.add_argument("--quick", action="store_true", help="few steps: shows that it runs, its figures mean nothing")
    args = command.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    gc.set_threshold(200_000, 20, 20)  # all that a run holds is looked at again and again otherwise
    for name in args.tables:
        cells = TABLES[name](args.quick)
        print(f"### {cells[0].table}\n", flush=True)
        simulated(cells)


if __name__ == "__main__":
    main()
