"""The board for Grafana in `launchers/grafana_board.json`: its panels are chosen here, and explained by the glossary.

`python -m asyncrl.observe.metrics.grafana > board.json` writes the board.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.comm.ended_rollouts import DROPPED
from asyncrl.observe.metrics.glossary import Figure, Metric, glossary
from asyncrl.observe.metrics.prometheus import metric_name

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
            place = {"x": number % PER_LINE * WIDTH, "y": y + 1 + number // PER_LINE * HEIGHT, "w": WIDTH, "h": HEIGHT}
            shown = [entry for name in names for entry in _named(name, entries)]
            panels.append(_panel(len(panels) + 1, panel, shown, place))
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


def _panel(number: int, title: str, entries: list[Metric | Figure], place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": "\n\n".join(f"`{entry.name}`: {entry.meaning}" for entry in entries),
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": _unit(entries[0]), "custom": {"spanNulls": True}}, "overrides": []},
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


def _unit(entry: Metric | Figure) -> str:
    return "short" if entry.grows else _UNITS.get(entry.unit, "short")


def _legend(entry: Metric | Figure) -> str:
    labels = ["process"] if isinstance(entry, Figure) else [part.split(">")[0] for part in entry.name.split("<")[1:]]
    return " ".join([entry.name.split("<")[0].rstrip("/_"), *(f"{{{{{label}}}}}" for label in labels), "{{run}}"])


if __name__ == "__main__":
    print(json.dumps(board(), indent=1, ensure_ascii=False))
