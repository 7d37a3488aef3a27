"""From a row of the dataset to the `Prompt` that an agent receives: one place, so that all processes make the same."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.api import Prompt, SamplingParams, Tokenizer
from asyncrl.datasets import Dataset
from asyncrl.datasets.order import PromptRef, prompt_seed


class BadPrompt(ValueError):
    """A row that makes no prompt, however often it is tried; the message names the row and what to do."""


def make_prompt(
    ref: PromptRef,
    dataset: Dataset,
    tokenizer: Tokenizer,
    group_size: int,
    sampling: SamplingParams,
    run_seed: int,
) -> Prompt:
    """The prompt at `ref`, tokenised, with a sampling seed of its own and the tokenizer's end token as stop token.

    Raises:
        KeyError: the dataset's row has no `prompt`.
        BadPrompt: it is empty.
    """
    row = dataset.row(ref.row)
    input_ids = tuple(tokenizer.encode(row["prompt"]))
    if not input_ids:
        raise BadPrompt(f"row {ref.row} of the dataset has an empty prompt: give it at least one token")
    seeded = replace(
        sampling, seed=prompt_seed(run_seed, ref.order, ref.attempt), stop_token_ids=(tokenizer.eos_token_id,)
    )
    return Prompt(ref.prompt_id, ref.order, row, input_ids, group_size, seeded)
