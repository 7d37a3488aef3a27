"""Metrics and figures of runs in Prometheus' text format, read from the runs' files; and the board that shows them in
Grafana.

`prometheus_text` answers one endpoint for all processes of the runs. It reads files only, so watching costs a run
nothing, and the last figures of a dead process stay visible.

Names and help texts follow from the glossary. `rollout/generate_s` is `asyncrl_rollout_generate_s`, and a placeholder
is a label: `eval/held_out/accuracy` is `asyncrl_eval_accuracy{set="held_out"}`. Figures of `observed/` are
`asyncrl_process_<figure>{process="<kind>/<index>"}`. The label `run` is `<experiment>/<trial>`.

The panels of the board in `launchers/grafana_board.json` are chosen here, and explained by the glossary: `python -m
asyncrl.observe.metrics.prometheus > board.json` writes it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from asyncrl.comm.ended_rollouts import DROPPED
from asyncrl.observe.history import History
from asyncrl.observe.metrics.glossary import NO_FIGURES, Figure, Metric, find_figure, glossary, match

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
            kind = "counter" if entry.grows else "gauge"
            families[name] = Family(name.removesuffix("_total"), entry.meaning + unit, kind)
        families[name].add_sample(name, labels, value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Family]:
        return iter(self._families)


BOARD: dict[str, dict[str, tuple[str, ...]]] = {
    "Does it learn?": {
        "Reward": ("reward/mean", "reward/min", "reward/max"),
        "Accuracy of the evaluations": ("eval/<set>/accuracy",),
        "Groups without a difference": ("reward/frac_zero_std",),
        "Length of answers": ("rollout/len_mean", "rollout/len_max"),
        "Answers cut off": ("rollout/truncated", "eval/<set>/truncated"),
        "Entropy": ("entropy",),
    },
    "Is it healthy?": {
        "Age of trained tokens": ("staleness/mean", "staleness/max"),
        "Difference between engines": ("ppo/engine_gap", "ppo/engine_gap_max"),
        "Movement of the policy": ("ppo/approx_kl", "ppo/behave_kl"),
        "Gradient": ("grad_norm", "grad_norm/max"),
        "Dropped rollouts": (DROPPED + "*",),
        "Restarts": ("restarts",),
    },
    "Why is it slow?": {
        "A step": ("time/step_s", "time/wait_for_batch_s", "time/train_s", "time/publish_s", "time/wait_eval_s"),
        "A rollout": (
            "rollout/generate_s",
            "rollout/reward_s",
            "rollout/env_s",
            "rollout/tool_s",
            "rollout/buffered_s",
        ),
        "Tokens a second": ("throughput/gen_tokens_per_s", "throughput/train_tokens_per_s"),
        "Rollouts": ("rollouts_running", "finished_untrained", "gate_limit"),
        "Samples on servers": ("running", "queued"),
        "KV cache": ("kv_share",),
    },
    "Processes": {
        "Processors in use": ("cpu_s",),
        "Threads without a core": ("no_core_s",),
        "Memory": ("rss",),
        "Memory of GPUs": ("gpu_used",),
        "Delay of event loops": ("loop_late_s",),
        "Free memory of hosts": ("host_free",),
    },
}
"""By row of the board the panels, each with its metrics and figures by their names in the glossary; with `*` at its end
a name stands for all that begin so."""
WIDTH, HEIGHT, PER_LINE = 8, 7, 3
"""Size of a panel in Grafana's units, of which a line has 24."""
_UNITS = {"s": "s", "bytes": "bytes", "share": "percentunit", "tokens/s": "short"}


def board() -> dict[str, Any]:
    """Return the board as Grafana imports it.

    Raises:
        KeyError: a panel names a metric that the glossary does not have.
    """
    entries: dict[str, Metric | Figure] = {metric.name: metric for metric in glossary().metrics}
    entries |= {figure.name: figure for figure in glossary().figures}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, chosen in BOARD.items():
        at = {"x": 0, "y": y, "w": WIDTH * PER_LINE, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}
        )
        for number, (panel, names) in enumerate(chosen.items()):
            cell = {"x": number % PER_LINE * WIDTH, "y": y + 1 + number // PER_LINE * HEIGHT, "w": WIDTH, "h": HEIGHT}
            shown = [entry for name in names for entry in _named(name, entries)]
            panels.append(_panel(len(panels) + 1, panel, shown, cell))
        y += 1 + -(-len(chosen) // PER_LINE) * HEIGHT
    return {
        "title": "asyncrl",
        "uid": "asyncrl",
        "schemaVersion": 39,
        "tags": ["asyncrl"],
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_SOURCE, _RUN]},
        "panels": panels,
    }


def _named(name: str, entries: Mapping[str, Metric | Figure]) -> list[Metric | Figure]:
    if not name.endswith("*"):
        return [entries[name]]
    return [entry for each, entry in entries.items() if each.startswith(name[:-1])]


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_RUN = {
    "name": "run",
    "type": "query",
    "datasource": _DATASOURCE,
    "query": "label_values(asyncrl_step, run)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
}


def _panel(number: int, title: str, entries: list[Metric | Figure], cell: dict[str, int]) -> dict[str, Any]:
    unit = "short" if entries[0].grows else _UNITS.get(entries[0].unit, "short")
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": "\n\n".join(f"`{entry.name}`: {entry.meaning}" for entry in entries),
        "datasource": _DATASOURCE,
        "gridPos": cell,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"spanNulls": True}}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": _expression(entry),
                "legendFormat": _legend(entry),
            }
            for index, entry in enumerate(entries)
        ],
    }


def _expression(entry: Metric | Figure) -> str:
    """Return the query for `entry`; a process's counter is shown as its growth per second."""
    selected = f'{metric_name(entry)}{{run=~"$run"}}'
    return f"rate({selected}[1m])" if entry.grows and isinstance(entry, Figure) else selected


def _legend(entry: Metric | Figure) -> str:
    labels = ["process"] if isinstance(entry, Figure) else [part.split(">")[0] for part in entry.name.split("<")[1:]]
    return " ".join([entry.name.split("<")[0].rstrip("/_"), *(f"{{{{{label}}}}}" for label in labels), "{{run}}"])


if __name__ == "__main__":
    print(json.dumps(board(), indent=1, ensure_ascii=False))
