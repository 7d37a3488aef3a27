"""The prompts of training and evaluation: their datasets, and the format that turns a row into a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.api import Prompt, SamplingParams, ToolSchema
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.config.setting import ConfigError, token_ids
from asyncrl.config.variants import EvaluationSet, evaluation_sets
from asyncrl.data.datasets import DataRecord, Dataset, load_dataset
from asyncrl.data.prompt_format import PromptFormat, load_chat_template, make_prompt
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.data.settings import is_data_path
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.models.model_config import placeholder_id, read_model_config
from asyncrl.trainer.settings import VisionMode

if TYPE_CHECKING:
    from asyncrl.models.picture_rules import PictureRules


class Prompts:
    """The prompts of a run, by reference or by row.

    Args:
        form: the format of prompts, without tools.
        offered: returns the tools that the agent of training (None) or of an evaluation set offers from its first call
            on. Called at the first prompt, because tools of MCP servers are known only once these run.
        training: True if the run trains and needs the training set.

    Attributes:
        eval_sets: by name, the evaluation sets and their rows.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        form: PromptFormat,
        offered: Callable[[EvaluationSet | None], tuple[ToolSchema, ...]],
        training: bool,
    ) -> None:
        self._config, self._form, self._offered = config, form, offered
        self._formats: dict[str, PromptFormat] = {}
        sampling = config.rollout.sampling
        own = {"stop": tuple(sampling.stop), "allowed_token_ids": token_ids(sampling.allowed_token_ids)}
        given = asdict(sampling)
        del given["max_new_tokens_from"]  # `train` knows the version
        self._sampling = SamplingParams(**given | own)
        self._train_set = load_train_set(config) if training else None
        self.eval_sets = {
            each.name: (each, load_eval_set(config, each)) for each in evaluation_sets(config) if each.interval
        }

    @property
    def train_set(self) -> Dataset:
        """The rows to train on."""
        assert self._train_set is not None, "only a worker that trains has a training set"
        return self._train_set

    def train(self, ref: PromptRef, version: int = 0) -> Prompt:
        """Return the training prompt at `ref`, for a rollout that begins at policy version `version`.

        Raises:
            InvalidPrompt: its row has no valid prompt, or a prompt longer than `dataset.max_prompt_tokens` that must
                not be shortened.
        """
        most = self._config.rollout.sampling.max_new_tokens_at(version)
        sampling = replace(self._sampling, max_new_tokens=most)
        return self._prompt(ref, self.train_set, self._config.group_size, sampling, None)

    def evaluation(self, name: str, row: int, member: int) -> Prompt:
        """Return row `row` of the evaluation set `name`, for one answer, the `member`-th.

        Raises:
            InvalidPrompt: as for `train`.
        """
        each, rows = self.eval_sets[name]
        sampling = replace(
            self._sampling, temperature=each.temperature, top_p=each.top_p, max_new_tokens=each.max_new_tokens
        )
        ref = PromptRef(f"eval-{name}-{row}-{member}", row, row, attempt=member)
        return self._prompt(ref, rows, 1, sampling, each)

    def _first(self, each: EvaluationSet | None) -> PromptFormat:
        """Return the format in which a row is rendered for its agent's first call, of `each` or of training."""
        group = "" if each is None else each.group
        if group not in self._formats:
            self._formats[group] = replace(self._form, tools=self._offered(each))
        return self._formats[group]

    def _prompt(
        self, ref: PromptRef, rows: Dataset, group_size: int, sampling: SamplingParams, each: EvaluationSet | None
    ) -> Prompt:
        return make_prompt(
            ref, rows, self._first(each), group_size=group_size, sampling=sampling, run_seed=self._config.seed
        )


def load_prompt_format(config: ExperimentConfig) -> PromptFormat:
    """Build the prompt format from the tokenizer in `model.path` and the settings of `dataset`; without tools.

    Raises:
        ConfigError: the tokenizer or the chat template cannot be read, or a template's setting is given without a
            template.
    """
    folder, data = Path(str(config.model.path)).expanduser(), config.dataset
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as error:  # tokenizers has no exception class
        reason = (str(error).strip() or "no reason").splitlines()[0]
        raise ConfigError(
            f"model.path={config.model.path!r}: its tokenizer cannot be used ({type(error).__name__}: {reason}); "
            "download tokenizer.json and tokenizer_config.json of this model too"
        ) from error
    return PromptFormat(
        tokenizer,
        load_chat_template(folder, data),
        data.max_prompt_tokens,
        data.overlong,
        pictures=pictures_taken(config),
    )


def pictures_taken(config: ExperimentConfig) -> PictureRules | None:
    """Return the rules for pictures in prompts; None if the model or the generation servers take no pictures."""
    described = Path(str(config.model.path)).expanduser() / "config.json"
    if config.model.vision == VisionMode.none or not described.is_file():
        return None
    model = read_model_config(described.parent)
    taken = config.generation.engine.takes_pictures(config.manager.weight_transport, str(model.get("model_type")))
    if not taken or placeholder_id(model) is None:
        return None
    from asyncrl.models.picture_rules import PictureRules  # only for models that take pictures

    return PictureRules(described.parent)


def load_train_set(config: ExperimentConfig) -> Dataset:
    """Return the prompts to train on.

    Raises:
        ConfigError: they cannot be loaded.
    """
    data, seed = config.dataset, config.seed
    if not data.sources:
        return _load_set("dataset", data.path, data.args, data.fields, "train", seed)
    sources = [
        _load_set(f"dataset.sources[{number}]", source.path, source.args, source.fields, "train", seed)
        for number, source in enumerate(data.sources)
    ]
    names = [source.name or source.path for source in data.sources]
    from asyncrl.data.mixture import Mixture  # only of several sources

    try:
        return Mixture(sources, [source.weight for source in data.sources], names)
    except ValueError as error:
        raise ConfigError(f"dataset.sources: {error}") from None


def check_same_data(record: Path, rows: Dataset, path: str) -> None:
    """Check that `rows` are those that the launcher read.

    Args:
        record: the launcher's record of its data; without the file nothing is checked.
        rows: the training set.
        path: `dataset.path`.

    Raises:
        ConfigError: the data changed since the launcher read it.
    """
    if record.is_file() and (difference := DataRecord.read(record).difference(rows, path)) is not None:
        raise ConfigError(f"dataset.path={difference}: the data changed while the run started; start it again")


def load_eval_set(config: ExperimentConfig, each: EvaluationSet) -> Dataset:
    """Load the rows of an evaluation set: from its `path`, or the held-out rows of the training set.

    Raises:
        ConfigError: they cannot be loaded, or the training set has several sources, which hold nothing out.
    """
    data = config.dataset
    if each.path is not None:
        return _load_set(each.group, each.path, each.args, each.fields, "held_out", config.seed)
    if data.sources:
        raise ConfigError("eval.path=null: of dataset.sources nothing is held out; give evaluation a set of its own")
    group = each.group if each.args else "dataset"
    return _load_set(group, data.path, {**data.args, **each.args}, data.fields, "held_out", config.seed)


def _load_set(
    group: str, path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str, seed: int
) -> Dataset:
    if fields and is_data_path(path):
        args = {**args, "fields": dict(fields)}
    try:
        return load_dataset(path, args, split, seed)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error
