"""The user's parts of a run, built as the config names them: dataset, tokenizer, agent, environment, reward."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.api import Agent, Environment, Prompt, RewardFunction, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.import_paths import load_plugin
from asyncrl.datasets import Dataset, load_dataset
from asyncrl.datasets.order import PromptRef
from asyncrl.datasets.prompts import make_prompt
from asyncrl.datasets.tokenizers import load_tokenizer


class Plugins:
    """Everything a RolloutWorker takes from the user.

    Raises:
        PluginError: a path names nothing.
        TypeError: a constructor refuses its arguments, or a path names something of another kind.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        assert config.model.path is not None, "the launcher resolves model.path before it starts a worker"
        self._config = config
        sampling = config.rollout.sampling
        self._sampling = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        self.tokenizer = load_tokenizer(config.model.path)
        model_config = json.loads((Path(config.model.path) / "config.json").read_text())
        self.vocab_size: int | None = model_config.get("vocab_size")
        self.train_set = load_dataset(config.dataset.path, config.dataset.args, "train", config.seed)
        self.eval_set = self._load_eval_set()
        self.agent: Agent = _built(config.agent.path, Agent, tokenizer=self.tokenizer, **config.agent.args)
        reward = load_plugin(config.reward.path)
        self._reward: RewardFunction = functools.partial(reward, **config.reward.args) if config.reward.args else reward

    def make_env(self) -> Environment:
        """A new environment, for one prompt."""
        made: Environment = _built(self._config.env.path, Environment, reward=self._reward, **self._config.env.args)
        return made

    def train_prompt(self, ref: PromptRef) -> Prompt:
        """The training prompt at `ref`.

        Raises:
            ValueError: it is longer than `dataset.max_prompt_tokens`.
        """
        return self._prompt(ref, self.train_set, self._config.group_size, self._sampling)

    def eval_prompt(self, row: int) -> Prompt:
        """Row `row` of the evaluation set: one greedy sample."""
        return self._prompt(
            PromptRef(f"eval-{row}", row, row), self.eval_set, 1, replace(self._sampling, temperature=0.0)
        )

    def _load_eval_set(self) -> Dataset:
        config = self._config
        if config.eval.path is not None:
            return load_dataset(config.eval.path, config.eval.args, "held_out", config.seed)
        return load_dataset(config.dataset.path, {**config.dataset.args, **config.eval.args}, "held_out", config.seed)

    def _prompt(self, ref: PromptRef, dataset: Dataset, group_size: int, sampling: SamplingParams) -> Prompt:
        prompt = make_prompt(
            ref, dataset, self.tokenizer, group_size=group_size, sampling=sampling, run_seed=self._config.seed
        )
        limit = self._config.dataset.max_prompt_tokens
        if len(prompt.input_ids) > limit:
            raise ValueError(
                f"dataset.max_prompt_tokens={limit}: row {ref.row} has a prompt of {len(prompt.input_ids)} tokens; "
                "raise the setting, or leave such rows out of the dataset"
            )
        return prompt


def _built(path: str, base: type, **arguments: object) -> Any:
    made = load_plugin(path)(**arguments)
    if not isinstance(made, base):
        raise TypeError(f"{path!r} made a {type(made).__name__}; it needs to be a {base.__name__}")
    return made
