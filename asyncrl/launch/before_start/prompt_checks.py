"""Checks of a run's prompts, made as the run would make them, with their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from asyncrl.config.context import context_length, turns
from asyncrl.config.evaluation_sets import evaluation_sets, with_code_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOGS_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.same_data import not_found_elsewhere
from asyncrl.models.model_config import read_model_config
from asyncrl.plugins.datasets import Placed
from asyncrl.plugins.datasets.prompt_format import PicturesRefused
from asyncrl.plugins.datasets.prompt_stats import PromptStats, measure_prompts, shown
from asyncrl.plugins.datasets.settings import Overlong
from asyncrl.rollout.user_code.agents import offered_tools, offers_tools
from asyncrl.rollout.user_code.conversations import load_chat_format
from asyncrl.rollout.user_code.prompts import load_eval_set, load_prompt_format, load_train_set
from asyncrl.rollout.user_code.tools import check_format

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
        ConfigError: a set has no row that makes a prompt, one has pictures where the run takes none, or
            `dataset.overlong=refuse` and a prompt is too long.
    """
    if messages := list(not_found_elsewhere(config)):
        raise ConfigError("\n".join(messages))
    prompt_format = load_prompt_format(config)
    check_format(config, prompt_format.chat)
    due = [each for each in evaluation_sets(config) if each.interval]
    sets = {each.group: (with_code_of(config, each), load_eval_set(config, each)) for each in due}
    if not of_evaluation_alone:
        sets = {"dataset": (config, load_train_set(config)), **sets}
    found = {}
    for group, (played, rows) in sets.items():
        limit, overlong = config.dataset.max_prompt_tokens, config.dataset.overlong
        of_files = None if overlong is Overlong.refuse else FILE_ROWS_LOOKED_AT
        form = replace(prompt_format, tools=offered_tools(played))
        try:
            seen = measure_prompts(rows, form, of_files if isinstance(rows, Placed) else ROWS_LOOKED_AT)
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
    chat = load_chat_format(config, prompts)
    return [] if chat is None else chat.findings.lines()
