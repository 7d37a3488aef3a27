"""`python -m asyncrl.launch trace RUN`: a run in time, for ui.perfetto.dev or as a picture.

Exit codes: 0 written, 2 the folder is no run, or has none of the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.observe.history import History
from asyncrl.observe.timeline import timeline
from asyncrl.observe.timeline.chrome import chrome_trace
from asyncrl.observe.timeline.spans import LAST_STEPS
from asyncrl.observe.timeline.svg import svg_picture
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_OK

EVERYTHING = 1 << 62


def main(argv: Sequence[str], program: str) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} trace",
        description="Write what a run did when, as a Chrome trace (open it in ui.perfetto.dev) or an SVG picture.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the trace; default: trace.json")
    parser.add_argument("--svg", type=Path, metavar="FILE.svg", help="a picture")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(None, None),
        metavar="FROM:TO",
        help=f"train steps, such as 8:22, or `:` for all; default: the newest {LAST_STEPS}",
    )
    args = parser.parse_args(argv)
    first, last = args.steps
    try:
        history = History(args.run, keep_steps=LAST_STEPS if args.steps == (None, None) else EVERYTHING)
        line = timeline(history, first, last)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if args.svg is not None:
        args.svg.write_text(svg_picture(line, history.name), encoding="utf-8")
        print(f"{args.svg}: {len(line.spans)} spans")
    out = args.out or (None if args.svg is not None else Path("trace.json"))
    if out is not None:
        trace = chrome_trace(line, history.name)
        out.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
        size = out.stat().st_size / 1e6
        print(f"{out}: {len(trace['traceEvents'])} events, {size:.1f} MB; open it in https://ui.perfetto.dev")
    return EXIT_OK


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 0
        return low, (int(last) if last else EVERYTHING) if colon else low
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give FROM:TO, such as 8:22") from error
