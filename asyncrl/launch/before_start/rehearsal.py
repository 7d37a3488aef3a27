"""Check the user's code before any process of the run starts, and play one group of the training set with it, in
parallel with a start's other checks.

The launcher starts a process (`rehearsed`), because user code may hang, crash, or import packages that the launcher
must not import: `python -m asyncrl.launch.before_start.rehearsal FOLDER` reads `FOLDER/config.yaml` and checks that the
user's code can be called as the settings say. Unless they leave it out, it then builds the user's agent, environment,
rewards, tools and filters as a RolloutWorker does, and plays the first row with a valid prompt against made-up answers.
It writes the result to `FOLDER/outcome.json`.

An answer consists of the prompt's own tokens in random order, and the end token: any model may give such an answer
early in training. A group fails here if it would fail in the run: its agent raised, or too few of its episodes are
left.

If the run's rewards score its answers, they are tried too: their checks on the first rows of the training set, and the
reward of answers that are surely wrong, and of the rows' own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pkgutil
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.api import (
    Completion,
    EpisodeError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    Tokenizer,
)
from asyncrl.api.picture import Picture
from asyncrl.api.trajectory import WON, policy_of
from asyncrl.comm import names
from asyncrl.comm.ended_rollouts import LOST_EPISODES
from asyncrl.comm.waits import CALL_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.machine import bypass_proxy
from asyncrl.config.run_dir import read_run_config, write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import with_code_of
from asyncrl.data.datasets import Dataset, DemonstrationDataset, Located
from asyncrl.data.prompt_format import InvalidPrompt
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.rollout.checks import code_problems, problems_of_others
from asyncrl.rollout.episode import RetryLimits
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import Activity, UserCodeError, failed_label, metered
from asyncrl.runtime.plan import GROUP_RULES, POLICY_ANSWERS
from asyncrl.runtime.supervisor import end_marked

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.rollout.policy_answers import PolicyAnswers

_log = logging.getLogger(__name__)
OUTCOME_FILE = "outcome.json"
LIMIT_S = 60.0
_VARIABLE = "ASYNCRL_REHEARSAL"
"""Environment variable with which the rehearsal, and all that user code starts in it, are marked."""
_SWITCH = "if only made-up answers do this, set rollout.rehearse=false"
ROWS_TRIED = 1000
"""Number of first rows of which one must give a prompt; otherwise the check of all prompts reports why."""
ROWS_CHECKED = 20_000
"""Number of first rows that the rewards check."""
CHECK_S = 3.0
"""After which no further row is checked."""
NO_ANSWERS = ("", "I do not know.")
_MOST_TOKENS = 8
_PACKAGE = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class RehearsalOutcome:
    """Result of a rehearsal.

    Attributes:
        error: why the run would fail; None if it would not.
        where: lines of the user's code in which it failed, the innermost last.
        lost: numbers of failed episodes in a group that did not fail, by the code that failed and how.
        untrained: trained policies without a sample in the group.
        unrated: prioritised pools for which no sample has the policy's result against them.
        unasked: policies that are not trained and received no request.
        unrewarded: notes on rows that no answer can be right for, and on rewards that tell nothing apart.
    """

    error: str | None = None
    where: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    untrained: list[str] = field(default_factory=list)
    unrated: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    unrewarded: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the result to `folder`, for `read`."""
        (folder / OUTCOME_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RehearsalOutcome | None:
        """Read the result of the rehearsal in `folder`; None if it did not end by itself."""
        file = folder / OUTCOME_FILE
        return cls(**json.loads(file.read_text())) if file.is_file() else None


@contextmanager
def rehearsed(config: ExperimentConfig) -> Iterator[Callable[[], list[str]]]:
    """Begin the check of the user's code, and its rehearsal if a row is played. The function given to the block waits
    for the end and returns notes for the user. Nothing is done if the code is `unchecked`.

    Raises:
        ConfigError: by the given function, if the run would fail.
    """
    if unchecked(config):
        yield list
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-rehearsal-") as name:
        folder = Path(name)
        write_run_config(config, folder)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.launch.before_start.rehearsal", name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", _VARIABLE: name},
            )
        try:
            yield lambda: _found(process, folder, config)
        finally:
            with suppress(ProcessLookupError):  # with what user code started in an environment of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            end_marked(name, _VARIABLE)


def unchecked(config: ExperimentConfig) -> str | None:
    """Return why the code cannot be checked before the start; None if it is."""
    hosts = [host for host in config.system.hosts if names.ROLLOUT_WORKER in host.runs]
    if not hosts or any(not host.name for host in hosts):
        return None
    return "all RolloutWorkers are on other hosts, and this one may lack what their code needs"


def _found(process: subprocess.Popen[bytes], folder: Path, config: ExperimentConfig) -> list[str]:
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        undone = "the first row was not played to its end" if plays_first_row(config) else "the code was not checked"
        return [f"rehearsal: {undone} within {LIMIT_S:g} s; the run begins all the same"]
    outcome = RehearsalOutcome.read(folder)
    if outcome is None:
        last_lines = (folder / "output").read_text(errors="replace").strip().splitlines()[-5:]
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        ended = f"played the first row {ended}; {_SWITCH}" if plays_first_row(config) else f"imported the code {ended}"
        raise ConfigError("\n".join([f"rehearsal: the process that {ended}", *last_lines]))
    if outcome.error is not None:
        where = [f"rehearsal: {line}" for line in outcome.where]
        switch = [f"rehearsal: the first row was played with made-up answers; {_SWITCH}"] if where else []
        raise ConfigError("\n".join([outcome.error, *where, *switch]))
    lost = [
        f"rehearsal: {count} of {config.group_size} made-up answers to the first row were lost: {name}"
        for name, count in outcome.lost.items()
    ]
    untrained = [
        f"rehearsal: the agent returned no sample of policy {policy!r} for the first row; it is trained on those that "
        f"client.policy({policy!r}).samples(reward) returns"
        for policy in outcome.untrained
    ]
    unrated = [
        f"rehearsal: no sample of the first row has the metric {WON}{pool}, the result against policy {pool!r} from "
        "0 to 1, by which versions.pick=prioritised chooses; without it each member is as likely"
        for pool in outcome.unrated
    ]
    unasked = [
        f"rehearsal: nothing asked policy {policy!r} for the first row; its servers run all the same, so leave it out "
        f"of `policies` if client.policy({policy!r}) is never asked"
        for policy in outcome.unasked
    ]
    return lost + untrained + unrated + unasked + [f"rehearsal: {note}" for note in outcome.unrewarded]


def plays_first_row(config: ExperimentConfig) -> bool:
    """True if a row is played: not without a model, which has yet to be made, nor in a run of kept samples, nor in one
    whose sessions others open.
    """
    plays = not (config.samples.replay or config.is_online)
    return config.rollout.rehearse and config.model.path is not None and plays


class MadeUpPolicy:
    """Answers with up to eight tokens of the request itself, in random order, then the end token; scores with -1."""

    def __init__(self, tokenizer: Tokenizer, seed: int, trained: Collection[str] = ()) -> None:
        self.answers: PolicyAnswers | None = pkgutil.resolve_name(POLICY_ANSWERS)(trained) if trained else None
        self.asked: set[str] = set()
        """Names of the policies that received a request."""
        self._end, self._random = tokenizer.eos_token_id, random.Random(seed)
        self._left_out = frozenset(getattr(tokenizer, "control_tokens", {}).values())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer `request`, as version 0, after yielding to other tasks."""
        await asyncio.sleep(0)
        self.asked.add(request.policy)
        if request.score_from is not None:
            return GenerationResult(request.request_id, (), (-1.0,) * len(request.input_ids[request.score_from :]))
        answers = tuple(replace(self._answer(request), policy=request.policy) for _ in range(request.n))
        if self.answers is not None:
            self.answers.add(request.policy, answers)
        return GenerationResult(request.request_id, answers)

    def _answer(self, request: GenerationRequest) -> Completion:
        most = min(_MOST_TOKENS, request.sampling.max_new_tokens)
        if allowed := request.sampling.allowed_token_ids:
            drawn = self._random.choices(allowed, k=request.sampling.max_new_tokens)
            return _ended(drawn[: drawn.index(self._end) + 1] if self._end in drawn else drawn, self._end)
        known = [token for token in request.input_ids if token not in self._left_out]
        tokens = [*(self._random.choices(known, k=self._random.randint(0, most)) if known else ()), self._end][:most]
        return _ended(tokens, self._end)


async def _made_up_embeddings(episodes: Sequence[Sequence[Picture]]) -> list[tuple[float, ...]]:
    """Return made-up embeddings, because the EncoderServers do not run yet."""
    return [(float(number), 1.0) for number, _ in enumerate(episodes)]


def _ended(tokens: list[int], end: int | None) -> Completion:
    reason = FinishReason.stop if tokens[-1] == end else FinishReason.length
    return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), reason)


async def rehearse(config: ExperimentConfig) -> RehearsalOutcome:
    """Check the code as far as it shows how it is called. If a row is played, it is the first one with a valid prompt,
    of the training set and of each evaluation set with its own code.
    """
    problems = [*problems_of_others(config), *code_problems(config)]
    if problems or not plays_first_row(config):
        return RehearsalOutcome("\n".join(problems) or None)
    try:
        components = UserComponents(config)
        algorithm, rollout = config.algorithm, config.rollout
        rules = None
        if rollout.filters or rollout.shaping:
            rules = pkgutil.resolve_name(GROUP_RULES)(rollout, algorithm.plugins)
        async with components.entered():
            components.rewards.embedder = _made_up_embeddings if rollout.encoder.servers else None
            refused = _refused_rows(components)
            prompt = next(_prompts(components, refused), None)
            made_up = MadeUpPolicy(components.tokenizer, config.seed, config.trained_policies)
            tries = RetryLimits(1, algorithm.least_episodes, rollout.rollout_timeout_s)
            samples: Sequence[Sample] = ()
            counted: Mapping[str, float] = {}
            unrewarded: list[str] = []
            if prompt is not None:
                with metered() as meter:
                    samples, counted = await components.play_to_train(prompt, made_up, tries)
                if made_up.answers is not None:
                    made_up.answers.check(samples)
                if samples and rules is not None:
                    rules.judge(samples)
                    rules.shape(samples)
                if meter.intervals[Activity.reward]:
                    unrewarded = _refused(components, refused) + await _tried(components, refused)
            failed = await _evaluations(components, config, made_up)
            if failed is not None:
                return failed
    except ConfigError as error:
        return RehearsalOutcome(str(error))
    except Exception as error:  # whatever user code raises
        return RehearsalOutcome(_text_of(error, config), _users_lines(error))
    lost = {name.removeprefix(LOST_EPISODES): int(n) for name, n in counted.items() if name.startswith(LOST_EPISODES)}
    made = {policy_of(sample.group, config.trained_policies) for sample in samples}
    if not samples:
        return RehearsalOutcome(lost=lost, unrewarded=unrewarded)
    rated = {name.removeprefix(WON) for sample in samples for name in sample.metrics}
    unrated = [policy.name for policy in config.policies if policy.is_prioritised and policy.name not in rated]
    untrained = {*config.trained_policies}
    known = made_up.asked | untrained | {teacher.policy for teacher in algorithm.teachers}
    unasked = [policy.name for policy in config.policies if policy.name not in known]
    return RehearsalOutcome(None, [], lost, sorted(untrained - made), unrated, unasked, unrewarded)


def _refused_rows(components: UserComponents) -> tuple[int, dict[int, str]]:
    """Let the rewards check the first rows. Return how many they checked, and why they refuse each of those refused."""
    rows, until = components.prompts.train_set, time.monotonic() + CHECK_S
    refused: dict[int, str] = {}
    for number in range(min(ROWS_CHECKED, len(rows))):
        row = _row(rows, number)
        if time.monotonic() > until or row is None:
            return number, refused
        try:
            components.rewards.check_row(row)
        except ValueError as error:
            refused[number] = str(error)
    return min(ROWS_CHECKED, len(rows)), refused


def _row(rows: Dataset, number: int) -> Mapping[str, Any] | None:
    """Return a row of a user's dataset; None if it cannot be made, which is reported when it is drawn."""
    try:
        return rows.row(number)
    except Exception as error:
        _log.info("row %d cannot be made: %s: %s", number, type(error).__name__, error)
        return None


def _refused(components: UserComponents, checked: tuple[int, dict[int, str]]) -> list[str]:
    """Return a note on rows that the rewards refuse.

    Raises:
        ConfigError: they refuse all.
    """
    count, refused = checked
    if not refused:
        return []
    number, why = next(iter(refused.items()))
    rows = components.prompts.train_set
    location = rows.location(number) if isinstance(rows, Located) else f"row {number}"
    if len(refused) == count:
        raise ConfigError(f"dataset: the rewards refuse all of the first {count} rows: {location}: {why}")
    return [f"{len(refused)} of the first {count} rows are lost, as no answer can be right: {location}: {why}"]


async def _tried(components: UserComponents, checked: tuple[int, dict[int, str]]) -> list[str]:
    """Return a note if the rewards give the same to `NO_ANSWERS` and to the answers of the rows themselves.

    Raises:
        ConfigError: they are verdicts, and find all of them right.
    """
    rows = components.prompts.train_set
    tried: list[tuple[Mapping[str, Any], str]] = []
    own = ""
    for number in [number for number in range(min(10, len(rows))) if number not in checked[1]][:2]:
        if (row := _row(rows, number)) is None:
            return []
        forms = _forms(rows, row)
        own = " and the rows' own answers (as they are, boxed, after # or ####)" if forms else ""
        tried += [(row, text) for text in (*NO_ANSWERS, *forms)]
    try:
        async with asyncio.timeout(CALL_S):
            rewards = await asyncio.gather(*(components.rewards.answer(*each) for each in tried))
    except (TimeoutError, UserCodeError):  # both are told of where an episode meets them
        return []
    if len(set(rewards)) != 1 or (not own and not rewards[0]):
        return []
    what = f"the reward is {rewards[0]:g} for an empty text, {NO_ANSWERS[1]!r}{own}"
    if components.rewards.are_verdicts and rewards[0] > 0:
        raise ConfigError(f"reward: {what}; have it tell right answers from wrong ones")
    return [f"{what}; if it is the same for all answers of a group, nothing is learned from them"]


def _forms(rows: Dataset, row: Mapping[str, Any]) -> list[str]:
    """Return the row's own answer in the forms that rewards read; empty if it has none."""
    answer = row.get("answer")
    answer = answer[0] if isinstance(answer, list | tuple) and answer else answer
    forms = [] if isinstance(answer, bool) or not isinstance(answer, str | int | float) else [str(answer)]
    forms += [
        form.format(text) for text in forms for form in (r"\boxed{{{}}}", "#### {}", "#{}", "<answer>{}</answer>")
    ]
    if forms and isinstance(rows, DemonstrationDataset):
        with suppress(ValueError):
            forms += [shown] if isinstance(shown := rows.demonstration(row), str) else []
    return forms


def _prompts(components: UserComponents, checked: tuple[int, dict[int, str]]) -> Iterator[Prompt]:
    """Yield the prompts of the first rows, those that the rewards refuse last."""
    rows = sorted(range(min(ROWS_TRIED, len(components.prompts.train_set))), key=checked[1].__contains__)
    return _that_are(partial(components.prompts.train, PromptRef(f"rehearsal-{row}", row, row)) for row in rows)


def _that_are(made: Iterable[Callable[[], Prompt]]) -> Iterator[Prompt]:
    """Yield the prompts of rows with a valid prompt."""
    for make in made:
        try:
            yield make()
        except InvalidPrompt:
            continue


async def _evaluations(
    components: UserComponents, config: ExperimentConfig, policy: MadeUpPolicy
) -> RehearsalOutcome | None:
    """Play the first row of each evaluation set with its own code. Return the failure, if any."""
    for name, (each, rows) in components.prompts.eval_sets.items():
        if not each.code:
            continue
        numbers = range(min(ROWS_TRIED, each.size, len(rows)))
        prompt = next(_that_are(partial(components.prompts.evaluation, name, row, 0) for row in numbers), None)
        if prompt is None:
            continue
        try:
            with metered():
                await components.play_to_evaluate(name, prompt, policy)
        except Exception as error:  # whatever user code raises
            return RehearsalOutcome(f"{each.group}: {_text_of(error, with_code_of(config, each))}", _users_lines(error))
    return None


def _text_of(error: BaseException, config: ExperimentConfig) -> str:
    cause = _innermost(error)
    if isinstance(cause, UserCodeError | EpisodeError):  # its text names the failed code
        return str(cause)
    return f"{failed_label(error) or f'agent {config.agent.path}'}: {type(cause).__name__}: {cause}"


def _innermost(error: BaseException) -> BaseException:
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def _users_lines(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(_innermost(error).__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, sys.base_prefix, "<"))]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in users[-4:]]


def main() -> int:
    """The command; returns the exit code."""
    folder = Path(sys.argv[1])
    config = read_run_config(folder)
    bypass_proxy(config)
    asyncio.run(rehearse(config)).write(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
