"""Metrics and figures of runs in Prometheus' text format, read from the runs' files.

`prometheus_text` answers one endpoint for all processes of the runs. It reads files only, so watching costs a run
nothing, and the last figures of a dead process stay visible.

Names and help texts follow from the glossary. `rollout/generate_s` is `asyncrl_rollout_generate_s`, and a placeholder
is a label: `eval/held_out/accuracy` is `asyncrl_eval_accuracy{set="held_out"}`. Figures of `observed/` are
`asyncrl_process_<figure>{process="<kind>/<index>"}`. The label `run` is `<experiment>/<trial>`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from asyncrl.observe.history import History
from asyncrl.observe.metrics.glossary import NO_FIGURES, Figure, Metric, find_figure, match

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOW_AND_THEN = ("eval/", "checkpoint/")
"""Metrics that not every row has: the newest value stays until there is another, for `LOOK_BACK` rows at most."""
LOOK_BACK = 1000
WRITTEN_AT = Figure(
    name="written_at", of="every process", unit="s", meaning="When the process wrote its newest line, since 1970."
)
RUN_STATE = Metric(
    name="state", meaning="State of the run: 1 for the state in the label.", healthy="Running or finished."
)
OWN = Metric(
    name="own/<name>",
    meaning="Metric that the glossary does not have: of your own code.",
    healthy="Depends on your code.",
)


class _Value(NamedTuple):
    entry: Metric | Figure
    labels: dict[str, str]
    value: float


def metric_name(entry: Metric | Figure) -> str:
    """Return the name that Prometheus has for an entry of the glossary; that of a total ends in `_total`."""
    fixed = re.sub(r"<\w+>", "", entry.name)
    name = re.sub(
        r"[^a-zA-Z0-9]+", "_", f"asyncrl/process/{fixed}" if isinstance(entry, Figure) else f"asyncrl/{fixed}"
    )
    name = name.strip("_").removesuffix("_total")
    return f"{name}_total" if entry.grows else name


def prometheus_text(histories: Iterable[History]) -> str:
    """Return the newest metrics of the runs and the newest figures of their processes, in Prometheus' text format."""
    return exposed(value for history in histories for value in values_of(history))


def values_of(history: History) -> Iterator[_Value]:
    """Yield the newest metrics of a run, and the newest figures of each of its processes that has not ended."""
    run = {"run": history.name}
    yield _Value(RUN_STATE, run | {"state": history.state.value}, 1.0)
    yield from of_row(newest(history.rows), run)
    for name, process in history.processes.items():
        if process.last and not process.last.get("ended"):
            yield from of_line(process.last, run | {"process": name})


def newest(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the newest row, with the newest values of metrics that not every row has."""
    last, *older = [*itertools.islice(reversed(rows.values()), LOOK_BACK)] or [{}]
    found = dict(last)
    for row in older:
        found = {name: value for name, value in row.items() if name.startswith(NOW_AND_THEN)} | found
    return found


def of_row(row: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[_Value]:
    """Yield the numbers of a row of metrics."""
    for name, value in row.items():
        if isinstance(value, (int, float)):
            entry, filled_in = match(name) or (OWN, {"name": name})
            yield _Value(entry, {**labels, **filled_in}, value)


def of_line(line: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[_Value]:
    """Yield the figures of a line of `observed/`, and when it was written."""
    yield _Value(WRITTEN_AT, dict(labels), line["at"])
    for name, value in line.items():
        if name not in NO_FIGURES and isinstance(value, (int, float)) and (figure := find_figure(name)) is not None:
            yield _Value(figure, dict(labels), value)


def exposed(values: Iterable[_Value]) -> str:
    """Return `values` in the text format, each metric once with its help text and kind."""
    families: dict[str, Family] = {}
    for entry, labels, value in values:
        name = metric_name(entry)
        if name not in families:
            unit = f" Unit: {entry.unit}." if entry.unit else ""
            families[name] = Family(name.removesuffix("_total"), entry.meaning + unit, _kind(entry))
        families[name].add_sample(name, labels, value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


def _kind(entry: Metric | Figure) -> str:
    return "counter" if entry.grows else "gauge"


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Family]:
        return iter(self._families)
