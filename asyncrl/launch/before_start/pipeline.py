"""The checks of a start, once its settings and data are right. `train`, `rollout` and `eval` make them and end at the
first that fails; `doctor EXPERIMENT` makes all and shows each.

    settings   complete                hub names, length, bounds, each package's rules, the graph
    data       check_data              the files and classes of all data sets
    hosts, devices, model, prompts, first row or code      StartChecks

What child processes check begins first and runs beside the rest: the models' files, and the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.prompt_format import PromptStats
from asyncrl.launch.before_start.data import chat_notes, check_prompts
from asyncrl.launch.before_start.machine import check_colocated_fit, check_reachable, device_lines
from asyncrl.launch.before_start.models import loaded_folders, whole_models
from asyncrl.launch.before_start.rehearsal import plays_first_row, rehearsed, unchecked
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.plan import Purpose, with_types


@dataclass
class Outcome:
    """Outcome of a check that found nothing wrong.

    Attributes:
        found: lines about what there is, made only if they are read.
        notes: lines for whoever starts the run.
        skipped: the check was not made; `found` says why.
    """

    found: Iterable[str] = ()
    notes: list[str] = field(default_factory=list)
    skipped: bool = False


class StartChecks:
    """The checks of a start in their order, each with its name. A context manager, whose end ends what still runs.

    Args:
        config: settings that are `complete`. Without `model.path`, nothing that needs the model is checked.
        purpose: of the launch; an evaluation has no training set.
    """

    statistics: dict[str, PromptStats]
    """Of the prompts, once these are checked."""

    def __init__(self, config: ExperimentConfig, purpose: Purpose = Purpose.train) -> None:
        self._config, self._purpose, self._evaluates = config, purpose, purpose is Purpose.evaluate

    def __enter__(self) -> Self:
        config, generates_only = self._config, self._evaluates or self._config.samples.only
        with ExitStack() as begun:
            self._code_notes = begun.enter_context(rehearsed(config))
            if config.model.path is not None:
                folders = loaded_folders(config, evaluates=generates_only)
                self._models_are_whole = begun.enter_context(whole_models(folders))
            self._begun = begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begun.close()

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Outcome]]]:
        """Yield each check's name, and the call that makes it.

        The call raises ConfigError if the run cannot start, TrialError if a host does not answer now.
        """
        yield "hosts", self._hosts
        yield "devices", self._devices
        if self._config.model.path is not None:
            yield "model", self._models
            yield "prompts", self._prompts
        yield "first row" if plays_first_row(self._config) else "code", self._code

    def notes(self) -> list[str]:
        """Make all checks; return the notes for whoever starts the run. Raises as they do."""
        return [note for _, check in self for note in check().notes]

    def _hosts(self) -> Outcome:
        hosts = self._config.system.hosts
        notes = [f"WARNING: {note}" for note in check_reachable(self._config)]
        return Outcome([f"{len(hosts)} hosts answer" if hosts else "this one"], notes)

    def _devices(self) -> Outcome:
        backend_class(self._config.system.launcher).check_host()
        check_colocated_fit(self._config)
        return Outcome(device_lines(with_types(self._config, self._purpose)))

    def _models(self) -> Outcome:
        self._models_are_whole()
        return Outcome(["the files of each hold all of it"])

    def _prompts(self) -> Outcome:
        self.statistics = check_prompts(self._config, of_evaluation_alone=self._evaluates)
        return Outcome(self._prompt_lines())

    def _prompt_lines(self) -> Iterator[str]:
        limits = self._config.dataset.max_prompt_tokens, self._config.dataset.overlong
        for group, seen in self.statistics.items():
            yield f"{group}: {'; '.join(seen.lines(*limits))}"
        yield from chat_notes(self._config)

    def _code(self) -> Outcome:
        if why := unchecked(self._config):
            return Outcome([f"not checked: {why}"], skipped=True)
        right = "agent and reward took made-up answers to it"
        if not plays_first_row(self._config):
            right = "can be called as the settings say"
        notes = self._code_notes()
        return Outcome([] if notes else [right], notes)
