"""Gain of asynchronous training on hundreds of devices: the control plane's real code in virtual time.

    python benchmarks/simulate.py [--tables splits512 eta64 ...] [--quick] [--json PATH]

Finished rows are in the JSON file, so that what was cut off continues where it stopped; a row of another setup is
another row. The parts, and what of them is real: `simulator/__init__.py`, `simulator/simulation.py`.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

from common import parser
from simulator.report import Kept, tables
from simulator.scenarios import TABLES
from simulator.simulation import Stalled, simulate


def main() -> None:
    """Simulate what is missing, print the tables, write them where asked."""
    command = parser(__doc__)
    command.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="only these")
    command.add_argument("--quick", action="store_true", help="few steps: shows that it runs, its figures mean nothing")
    command.add_argument("--json", type=Path, default=Path("simulate.json"), help="where finished rows are kept")
    args = command.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    gc.set_threshold(200_000, 20, 20)  # all that a run holds is looked at again and again otherwise
    kept = Kept(args.json)
    cells = [cell for name in args.tables for cell in TABLES[name](args.quick)]
    for cell in cells:
        if not kept.has(cell.setup):
            try:
                kept.add(cell.setup, simulate(cell.setup))
            except Stalled as stalled:
                raise SystemExit(f"{cell.table}: {cell.label}: {stalled}") from stalled
            print(f"{cell.table}: {cell.label}: {kept.line(cell.setup)}", flush=True)
    print(tables(cells, kept))


if __name__ == "__main__":
    main()
