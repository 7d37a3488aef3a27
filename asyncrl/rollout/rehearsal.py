"""Play one group of the training set against made-up answers, before any process of the run starts.

`python -m asyncrl.rollout.rehearsal FOLDER` reads `FOLDER/config.yaml` and builds the user's agent, environment,
rewards, tools and filters as a RolloutWorker does. It plays the first row with a valid prompt and writes the result to
`FOLDER/outcome.json`. It is a separate process, because user code may hang, crash, or import packages that the launcher
must not import.

An answer consists of the prompt's own tokens in random order, and the end token: any model may give such an answer
early in training. A group fails here if it would fail in the run: its agent raised, or too few of its episodes are
left.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

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
from asyncrl.comm.ended_rollouts.drop_reasons import LOST_EPISODES
from asyncrl.config.evaluation_sets import with_code_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.no_proxy import bypass_proxy
from asyncrl.config.run_dir import read_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets.prompt_format import InvalidPrompt
from asyncrl.plugins.datasets.queue.order import PromptRef
from asyncrl.rollout.episode import GroupRules, RetryLimits
from asyncrl.rollout.generation.generated_tokens import GeneratedTokens
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.timing import metered
from asyncrl.rollout.user_code_pool.user_code_errors import UserCodeError, named_failure

OUTCOME_FILE = "outcome.json"
ROWS_TRIED = 1000
"""Number of first rows of which one must give a prompt; otherwise the check of all prompts reports why."""
_MOST_TOKENS = 8
_PACKAGE = str(Path(__file__).parents[1])


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
    """

    error: str | None = None
    where: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    untrained: list[str] = field(default_factory=list)
    unrated: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the result to `folder`, for `read`."""
        (folder / OUTCOME_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RehearsalOutcome | None:
        """Read the result of the rehearsal in `folder`; None if it did not end by itself."""
        file = folder / OUTCOME_FILE
        return cls(**json.loads(file.read_text())) if file.is_file() else None


class MadeUpPolicy:
    """Answers with up to eight tokens of the request itself, in random order, then the end token; scores with -1."""

    def __init__(self, tokenizer: Tokenizer, seed: int, trained: Collection[str] = ()) -> None:
        self.generated = GeneratedTokens(trained)
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
        self.generated.answered(request.policy, answers)
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
    """Play the first row with a valid prompt, of the training set and of each evaluation set with its own code."""
    try:
        components = UserComponents(config)
        algorithm, rollout = config.algorithm, config.rollout
        rules = GroupRules.of(rollout, algorithm.plugins)
        async with components.runner, components.tools:
            components.embed_with(_made_up_embeddings if rollout.encoder.servers else None)
            prompt = next(_prompts(components), None)
            made_up = MadeUpPolicy(components.tokenizer, config.seed, config.trained_policies)
            tries = RetryLimits(1, algorithm.least_episodes, rollout.rollout_timeout_s)
            samples: Sequence[Sample] = ()
            counted: Mapping[str, float] = {}
            try:
                if prompt is not None:
                    with metered():
                        samples, counted = await components.play_to_train(prompt, made_up, tries)
                    made_up.generated.check(samples)
                    if samples:
                        rules.judge(samples)
                        rules.shape(samples)
                failed = await _evaluations(components, config, made_up)
            finally:
                await components.conversations.endpoint.close()
            if failed is not None:
                return failed
    except ConfigError as error:
        return RehearsalOutcome(str(error))
    except Exception as error:  # whatever user code raises
        return RehearsalOutcome(_told(error, config), _users_lines(error))
    lost = {name.removeprefix(LOST_EPISODES): int(n) for name, n in counted.items() if name.startswith(LOST_EPISODES)}
    made = {policy_of(sample.group, config.trained_policies) for sample in samples}
    if not samples:
        return RehearsalOutcome(lost=lost)
    rated = {name.removeprefix(WON) for sample in samples for name in sample.metrics}
    unrated = [policy.name for policy in config.policies if policy.is_prioritised and policy.name not in rated]
    untrained = {*config.trained_policies}
    known = made_up.asked | untrained | {teacher.policy for teacher in algorithm.teachers}
    unasked = [policy.name for policy in config.policies if policy.name not in known]
    return RehearsalOutcome(lost=lost, untrained=sorted(untrained - made), unrated=unrated, unasked=unasked)


def _prompts(components: UserComponents) -> Iterator[Prompt]:
    rows = range(min(ROWS_TRIED, len(components.prompts.train_set)))
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
            return RehearsalOutcome(f"{each.group}: {_told(error, with_code_of(config, each))}", _users_lines(error))
    return None


def _told(error: BaseException, config: ExperimentConfig) -> str:
    cause = _innermost(error)
    if isinstance(cause, UserCodeError | EpisodeError):  # its text names the failed code
        return str(cause)
    failed = named_failure(error, config.agent.path).partition(" raised ")[0]
    return f"{failed}: {type(cause).__name__}: {cause}"


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
