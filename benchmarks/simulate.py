"""Gain of asynchronous training on hundreds of devices: the control plane's real code in virtual time.

    python benchmarks/simulate.py [--tables splits512 eta64 ...] [--quick] [--json PATH] [--docs DIR]
    python benchmarks/simulate.py --fit [--measured FILE] [--rounds 1] [--steps 32] [--record PATH]

Finished rows are in the JSON file, so that what was cut off goes on where it stopped; a row of another setup is another
row. `--docs` writes the tables and the plot of docs/results.md there. `--fit` adds rounds of measurements
of this machine and of real runs of the demo to a file, fits the model of each round to the first of its runs, and holds
all of them beside what the simulator says of them (`simulator.fit`); with `--rounds 0` it measures nothing, and needs
no quiet machine. `--record` keeps the groups that the first run generated, for `Recorded.of_file`. The parts, and what
of them is real: `simulator/__init__.py`, `simulator/simulation.py`.
"""

from __future__ import annotations

import argparse
import gc
import logging
from pathlib import Path

from simulator.report import Kept, plot, tables
from simulator.scenarios import TABLES
from simulator.simulation import Stalled, simulate


def main() -> None:
    """Simulate what is missing, print the tables, write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="only these")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, its figures mean nothing")
    parser.add_argument("--json", type=Path, default=Path("simulate.json"), help="where finished rows are kept")
    parser.add_argument("--docs", type=Path, help="folder for tables.md and scale.png")
    parser.add_argument("--fit", action="store_true", help="hold real runs beside their predictions")
    parser.add_argument("--measured", type=Path, default=Path("fit.json"), help="where --fit keeps its measurements")
    parser.add_argument("--rounds", type=int, default=1, help="rounds that --fit adds to them; 0: none")
    parser.add_argument("--steps", type=int, default=32, help="train steps of each real run of --fit")
    parser.add_argument("--record", type=Path, help="file for the groups that the first run of --fit had")
    parser.add_argument("--seed", type=int, help="of all rows, in place of 1")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    gc.set_threshold(200_000, 20, 20)  # all that a run holds is looked at again and again otherwise
    if args.fit:
        from simulator.fit import fit

        fit(args.measured, args.rounds, args.steps, args.record)
        return
    kept = Kept(args.json)
    cells = [cell for name in args.tables for cell in TABLES[name](args.quick)]
    for cell in cells:
        setup = kept.seeded(cell.setup, args.seed)
        if not kept.has(setup):
            try:
                kept.add(setup, simulate(setup))
            except Stalled as stalled:
                raise SystemExit(f"{cell.table}: {cell.label}: {stalled}") from stalled
            print(f"{cell.table}: {cell.label}: {kept.line(setup)}", flush=True)
    text = tables(cells, kept, args.seed)
    print(text)
    if args.docs is not None:
        args.docs.mkdir(parents=True, exist_ok=True)
        (args.docs / "tables.md").write_text(text)
        plot(cells, kept, args.docs / "scale.png", args.seed)


if __name__ == "__main__":
    main()
