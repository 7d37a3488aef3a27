"""The doctor: explains a run's speed, finds its problems, and suggests settings.

One set of rules serves the command `doctor RUN`, the dashboard's banner and the Python API. The rules read a `History`,
so they work on live, finished and dead runs alike, from their files alone. No process of a run imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.observe.doctor.bottleneck import balanced, bottlenecks
from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.health import problems
from asyncrl.observe.doctor.measured import Measured, measure
from asyncrl.observe.doctor.standing import findings_of_stops, without_processors
from asyncrl.observe.history import History
from asyncrl.observe.status import FEWEST_STEPS

if TYPE_CHECKING:
    from asyncrl.observe.doctor.stages import RunStage


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, the most severe first; `measured` is None if the run has too few steps."""

    findings: Sequence[Finding]
    measured: Measured | None
    not_measured: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, without what was measured."""
        return {
            "findings": [{**asdict(each), "link": each.link, "gain": each.gain} for each in self.findings],
            "stages": [asdict(stage) for stage in self.stages],
            "not_measured": list(self.not_measured),
        }

    @property
    def verdict(self) -> Finding | None:
        """The finding for a single line: a problem if there is one, else the bottleneck."""
        return self.findings[0] if self.findings else None

    @property
    def stages(self) -> Sequence[RunStage]:
        """The stages of the run, with the share of time in which each is in use."""
        from asyncrl.observe.doctor.stages import stages

        return () if self.measured is None else stages(self.measured)


def examine(history: History) -> Diagnosis:
    """Examine a run by its files."""
    measured = measure(history)
    found = [*findings_of_stops(history), *problems(history, measured)]
    missing: tuple[str, ...] = ()
    if measured is None:
        found += without_processors(history)
        missing = (f"speed: fewer than {FEWEST_STEPS} steps",)
    else:
        even = balanced(measured)
        found += list(bottlenecks(measured)) if even is None else [even]
        missing = measured.missing
    order = {Level.problem: 0, Level.bottleneck: 1, Level.remark: 2}
    findings = sorted(found, key=lambda finding: order[finding.level])
    return Diagnosis(findings, measured, missing)
