"""The data of a start: each data set is loaded; prompts are made as the run would make them, with their statistics; all
hosts read the same data.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from asyncrl.api import ToolSchema
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.memory import context_length, turns
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.run_dir import DATA_RECORD_FILE, LOGS_DIR, run_dir_of
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import evaluation_sets, with_code_of
from asyncrl.data.datasets import DataRecord, Located
from asyncrl.data.prompt_format import PicturesRefused, PromptStats, measure_prompts, shown
from asyncrl.data.settings import Overlong
from asyncrl.launch.before_start.models import base_model_config
from asyncrl.launch.before_start.setting_checks import supervised_checks
from asyncrl.master.evaluations import ALWAYS
from asyncrl.master.graph import load_graph
from asyncrl.models.model_config import ModelFacts, read_model_config
from asyncrl.rollout.user_code.episode_code import offers_tools
from asyncrl.rollout.user_code.prompts import load_eval_set, load_prompt_format, load_train_set
from asyncrl.rollout.user_code.rewards import load_rewards
from asyncrl.runtime.plan import BRING_INPUTS, INPUT_ERRORS, brings_inputs
from asyncrl.trainer.checks import CUTS
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.supervised.base_model import described, existing_base_model


def check_data(config: Config, folder: Path | None) -> None:
    """Load all data that a run would load, and the settings of the base model that it would make first.

    Raises:
        ConfigError: with every message, one per line.
    """
    if messages := list(dict.fromkeys(_wrong_data(config, folder))):
        raise ConfigError("\n".join(messages))


def _wrong_data(config: Config, folder: Path | None) -> Iterator[str]:
    if not isinstance(config, ExperimentConfig):
        yield from supervised_checks().wrong_rows(config)
        return
    loads: list[Callable[[], object]] = [partial(load_train_set, config)]
    loads += [partial(load_eval_set, config, each) for each in evaluation_sets(config) if each.interval]
    for load in loads:
        try:
            load()
        except ConfigError as error:
            yield str(error)
    if config.dataset.curriculum.path:
        from asyncrl.data.curriculum import OwnCurriculum

        try:
            OwnCurriculum(config.dataset.curriculum.path, config.dataset.curriculum.args).check()
        except ConfigError as error:
            yield str(error)
    yield from _no_verdict(config)
    kept = config.samples.replay
    if kept and not any(Path(kept).expanduser().glob("*.parquet")):
        yield (
            f"samples.replay={kept!r}: no folder of kept samples (*.parquet); give samples/ of a run, as `replay "
            "EXPERIMENT samples=RUN` does"
        )
    yield from not_found_elsewhere(config)
    if config.model.path is None:
        yield from base_model_faults(config, folder)


def _no_verdict(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error if `checkpoint.keep_best` names a metric of verdicts and no reward is one."""
    metric = config.checkpoint.keep_best
    if metric is None or metric.rpartition("/")[2] in ALWAYS:
        return
    measures = next((each for each in evaluation_sets(config) if metric.startswith(f"eval/{each.name}/")), None)
    if measures is not None:
        config = with_code_of(config, measures)
    try:
        parts = load_rewards(config.reward, config.rewards)
    except ConfigError as error:
        yield str(error)
        return
    if not any(part.verdict for part in parts):
        yield (
            f"checkpoint.keep_best={metric!r}: no reward is a verdict, so evaluations measure means alone; name "
            f"{metric.rpartition('/')[0]}/reward_mean, or mark the reward (asyncrl.api.verdict, or reward.verdict=true)"
        )


def base_model_faults(config: ExperimentConfig, folder: Path | None) -> Iterator[str]:
    """Yield an error message for each problem with the base model that `config` would make, and with its data.

    Raises:
        ConfigError: see `base_model_config`.
    """
    base = base_model_config(config, folder)
    graph = load_graph(config)
    if (placed := placement(config, graph)).is_cut:
        yield from import_module(CUTS).base_model_problems(config, graph, placed, ModelFacts.of(described(base)))
    if existing_base_model(base) is None:
        for fault in supervised_checks().wrong_rows(base):
            yield f"model.base_experiment={config.model.base_experiment!r}: {fault}"


ROWS_LOOKED_AT = 1000
"""Number of rows checked of a dataset class, whose rows may take time to make."""
FILE_ROWS_LOOKED_AT = 200_000
"""Number of rows checked of files, about a minute of work. Later rows are checked when they are used. If prompts that
are too long are refused, all rows are checked.
"""


def check_prompts(config: ExperimentConfig, *, of_evaluation_alone: bool = False) -> dict[str, PromptStats]:
    """Make the prompts of the training set and of the evaluation sets, with the tokenizer in `model.path`.

    Args:
        of_evaluation_alone: skip the training set.

    Returns:
        The statistics by the name of the setting's group: `dataset`, and for each evaluation set `eval`,
        `eval.sets[0]` and so on.

    Raises:
        ConfigError: tools cannot be called, or no agent takes them; a set has no row that makes a prompt, one has
            pictures where the run takes none, or `dataset.overlong=refuse` and a prompt is too long.
    """
    if messages := [*not_found_elsewhere(config), *optional_problems(config, "code_problems")]:
        raise ConfigError("\n".join(messages))
    prompt_format = load_prompt_format(config)
    if prompt_format.chat is not None:
        from asyncrl.rollout.user_code.conversations import check_thoughts

        check_thoughts(config, prompt_format.chat)
    offered: tuple[ToolSchema, ...] = ()
    if config.tools or config.mcp:
        from asyncrl.rollout.user_code.tools import check_format, offered_tools

        check_format(config, prompt_format.chat)
        offered = offered_tools(config)
    due = [each for each in evaluation_sets(config) if each.interval]
    sets = {each.group: (with_code_of(config, each), load_eval_set(config, each)) for each in due}
    if not of_evaluation_alone:
        sets = {"dataset": (config, load_train_set(config)), **sets}
    found = {}
    for group, (played, rows) in sets.items():
        limit, overlong = config.dataset.max_prompt_tokens, config.dataset.overlong
        of_files = None if overlong is Overlong.refuse else FILE_ROWS_LOOKED_AT
        form = replace(prompt_format, tools=offered if offers_tools(played) else ())
        try:
            seen = measure_prompts(rows, form, of_files if isinstance(rows, Located) else ROWS_LOOKED_AT)
        except PicturesRefused as error:
            raise ConfigError(f"{group}: {error}") from None
        found[group] = seen = replace(seen, mcp=bool(config.mcp) and offers_tools(played))
        if seen.overlong and overlong is Overlong.refuse:
            raise ConfigError(
                f"dataset.max_prompt_tokens={limit}: {seen.overlong} of {seen.looked_at} prompts of {group} are longer "
                f"({seen.first_overlong}, the longest {seen.longest}); raise it, or set dataset.overlong=filter"
            )
        left_out = seen.bad + (seen.overlong if overlong is Overlong.filter else 0)
        if left_out == seen.looked_at:
            why = seen.first_bad or f"{seen.first_overlong}, and dataset.max_prompt_tokens={limit}"
            raise ConfigError(f"{group}: none of {seen.looked_at} rows makes a prompt; {why}")
    answers = {"dataset": ("rollout.sampling.max_new_tokens", config.rollout.sampling.max_new_tokens)}
    for each in evaluation_sets(config):
        answers[each.group] = f"{each.group}.sampling.max_new_tokens", each.max_new_tokens
    if messages := list(_prompts_that_do_not_fit(config, found, answers)):
        raise ConfigError("\n".join(messages))
    return found


def _prompts_that_do_not_fit(
    config: ExperimentConfig, found: Mapping[str, PromptStats], answers: Mapping[str, tuple[str, int]]
) -> Iterator[str]:
    """Yield an error message for each set whose longest prompt leaves the model too few positions for an answer, or
    whose prompts have tokens that it has no embedding for.

    Args:
        answers: setting and value of the longest answer, by the name of the set's group.
    """
    path = config.model.path
    assert path is not None, "prompts are made with the model's tokenizer"
    described = read_model_config(path)
    limit = context_length(config, described)
    rows = (described.get("text_config") or described).get("vocab_size")
    for group, seen in found.items():
        if isinstance(rows, int) and seen.highest >= rows:
            yield (
                f"model.path={path!r}: a prompt of {group} has token {seen.highest}, and the model's embeddings have "
                f"{rows} rows: its tokenizer is of another model, or has tokens that the model was not given; use the "
                "tokenizer of the model, or resize the embeddings (transformers' resize_token_embeddings)"
            )
        setting, answer = answers[group]
        if seen.longest_used + answer > limit:
            yield (
                f"{setting}={answer}: model.path={path!r} has {limit} positions (max_position_embeddings), and the "
                f"longest prompt of {group} takes {seen.longest_used}; use {setting}="
                f"{max(limit - seen.longest_used, 1)} or less, dataset.max_prompt_tokens={max(limit - answer, 1)} or "
                "less, or a model with more positions"
            )


def show_prompts(
    config: ExperimentConfig, statistics: Mapping[str, PromptStats], run_dir: Path, note: Callable[[str], None]
) -> None:
    """Show statistics of the prompts and what the chat template does, with `note` and in `logs/prompts.log`.

    Args:
        statistics: result of `check_prompts`.
    """
    lines = [
        f"{group}: {line}"
        for group, found in statistics.items()
        for line in found.lines(config.dataset.max_prompt_tokens, config.dataset.overlong)
    ]
    if first := statistics["dataset"].first:
        text, length = first
        lines += [f"first prompt, {length} tokens:", shown(text)]
    lines += [f"chat template: {line}" for line in chat_notes(config)]
    for line in lines:
        note(line)
    logs = run_dir / LOGS_DIR
    logs.mkdir(exist_ok=True)
    (logs / "prompts.log").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")


def chat_notes(config: ExperimentConfig) -> list[str]:
    """Describe what the chat template does in conversations of several turns, if the settings allow them."""
    if turns(config) == 1:
        return []
    prompts = load_prompt_format(config)
    if prompts.chat is None:
        return []
    from asyncrl.rollout.user_code.conversations import load_chat_format

    chat = load_chat_format(config, prompts)
    return [] if chat is None else chat.findings.lines()


def keep_data_record(config: ExperimentConfig) -> None:
    """Write a record of the training data, unless the trial continues from a checkpoint and has one."""
    run_dir = run_dir_of(config)
    file = run_dir / DATA_RECORD_FILE
    if file.is_file():
        from asyncrl.runtime.trials.resume import newest_progress

        if newest_progress(run_dir) is not None:
            return
    DataRecord.of(load_train_set(config)).write(file)


def keep_inputs(config: ExperimentConfig, *, training: bool = True) -> None:
    """Keep a copy of the RolloutWorkers' present inputs, if these are brought to hosts that share no folder."""
    if brings_inputs(config):
        pkgutil.resolve_name(BRING_INPUTS)(config, run_dir_of(config), training=training)


def not_found_elsewhere(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each input or output of RolloutWorkers that is not shared with their hosts."""
    if not brings_inputs(config):
        return
    yield from pkgutil.resolve_name(INPUT_ERRORS)(config)
    if config.samples.eval_every:
        yield (
            f"samples.eval_every={config.samples.eval_every}: RolloutWorkers write the answers into the run's folder, "
            "which those on other hosts do not share (system.shared_filesystem=false); share it, or set "
            "samples.eval_every=0"
        )
