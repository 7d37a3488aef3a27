"""The tables of all metrics, with their values in a healthy run, and of all figures of processes.

`glossary.yaml` has the names in the rows of `metrics.jsonl`, and those in the lines of `observed/`, which
`asyncrl.observe.observer` writes. A metric's name may have placeholders, such as `eval/<set>/accuracy`; `find` returns
the entry of a name as it is in a row. `docs/metrics.md`, the help texts for Prometheus, Grafana's board and the
dashboard's tooltips are made from these tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts import DROPPED, DropReason
from asyncrl.comm.typed import decode_yaml

SAMPLES_OWN = ("agent", "tool", "chat", "reward", "rollout")
"""Groups of metrics that an answer brings with it, so that an evaluation has them too."""


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the table.

    Attributes:
        name: as in a row; `<...>` stands for a part that differs. In the last place it may contain slashes.
        unit: of the value; empty for a number without one.
        meaning: one or two sentences.
        healthy: the values of a run that is well, or what to look for.
        grows: the value is a total that only grows during a run.
    """

    name: str
    unit: str = ""
    meaning: str
    healthy: str
    grows: bool = False

    @property
    def group(self) -> str:
        """The prefix that the metric is listed under; empty for the metrics without a prefix."""
        return self.name.partition("/")[0] if "/" in self.name else ""


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure in the lines of `observed/`: of every process, or of one kind of them.

    Attributes:
        grows: True for a counter, of which a reader takes differences.
    """

    name: str
    of: str
    unit: str = ""
    meaning: str
    grows: bool = False


NO_FIGURES = frozenset({"at", "pid", "stage", "activity", "since", "ended", "failed", "shortage"})
"""Further keys in a line of `observed/`: its time, the process that wrote it, and what the process does."""


class Glossary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `glossary.yaml`, with a metric for each `DropReason`.

    Attributes:
        groups: titles of the groups of metrics, in the order of the page.
        metrics: their entries.
        figures: those of the figures.
    """

    groups: Mapping[str, str]
    metrics: Sequence[Metric]
    figures: Sequence[Figure]


@cache
def glossary() -> Glossary:
    """Return the tables, which are read once."""
    tables = decode_yaml(Path(__file__).with_name("glossary.yaml").read_bytes(), Glossary)
    dropped = [
        Metric(
            name=DROPPED + reason,
            unit="rollouts",
            meaning=f"Rollouts dropped since the step before, {reason.meaning}.",
            healthy=reason.healthy,
        )
        for reason in DropReason
    ]
    return msgspec.structs.replace(tables, metrics=[*tables.metrics, *dropped])


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    return tuple((_pattern(metric.name), metric) for metric in glossary().metrics if "<" in metric.name)


def _pattern(name: str) -> re.Pattern[str]:
    """Placeholders stand for anything without a slash; the last one, if the name ends with it, for anything."""
    *parts, end = re.split(r"<(\w+)>", name)
    pattern = ""
    for part, placeholder in zip(parts[::2], parts[1::2], strict=True):
        ends = not end and placeholder == parts[-1]
        own = rf"(?:{'|'.join(SAMPLES_OWN)})/.+" if placeholder == "metric" else ".+" if ends else "[^/]+"
        pattern += f"{re.escape(part)}(?P<{placeholder}>{own})"
    return re.compile(pattern + re.escape(end))


@cache
def _by_name() -> dict[str, Metric]:
    return {metric.name: metric for metric in glossary().metrics}


def find(name: str) -> Metric | None:
    """Return the entry of the metric `name` of a row; None if the table does not have it."""
    found = match(name)
    return None if found is None else found[0]


def match(name: str) -> tuple[Metric, dict[str, str]] | None:
    """Return the entry of the metric `name` of a row, and the text of each placeholder of the entry's name."""
    if (exact := _by_name().get(name)) is not None:
        return exact, {}
    for pattern, metric in _patterns():
        if found := pattern.fullmatch(name):
            return metric, found.groupdict()
    return None


@cache
def _figures() -> dict[str, Figure]:
    return {figure.name: figure for figure in glossary().figures}


def find_figure(name: str) -> Figure | None:
    """Return the entry of the figure `name` of a line in `observed/`; None if the table does not have it."""
    return _figures().get(name)
