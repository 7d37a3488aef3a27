"""Settings of the prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from asyncrl.config.setting import setting

AUTO, OFF = "auto", "off"
"""Values of `dataset.chat_template` that name no file."""


class Overlong(StrEnum):
    """Treatment of a prompt that is longer than `dataset.max_prompt_tokens`."""

    filter = "filter"
    """Its row is left out."""
    left = "left"
    """Its text loses its beginning."""
    right = "right"
    """Its text loses its end."""
    middle = "middle"
    """Its text loses its middle."""
    refuse = "refuse"
    """The run does not start."""


class TrainOn(StrEnum):
    """Choice of the assistant's turns that are imitated."""

    all = auto()
    """All of them."""
    last = auto()
    """The last one; those before it are part of its prompt."""


@dataclass
class SourceConfig:
    """One of several datasets."""

    path: str = setting("", "as dataset.path")
    args: dict[str, Any] = setting(help="as dataset.args", factory=dict)
    fields: dict[str, str] = setting(help="as dataset.fields", factory=dict)
    weight: float = setting(1.0, "its share of the rows is weight / sum of all weights")
    name: str = setting("", "its rows say `source: <name>`; empty: its path")


@dataclass
class CurriculumConfig:
    """Prompts that are too easy or too hard are left out of some epochs; docs/data.md."""

    path: str = setting(
        "", "import path of a class of yours that decides in place of low, high and rest (asyncrl.api.Curriculum)"
    )
    args: dict[str, Any] = setting(help="keyword arguments of its constructor", factory=dict)
    low: float = setting(
        0.0, "share of right answers from which a prompt is drawn in every epoch", minimum=0.0, maximum=1.0
    )
    high: float = setting(1.0, "share of right answers up to which it is", minimum=0.0, maximum=1.0)
    rest: int = setting(
        2, "epochs that a prompt outside is left out of; then it is measured again", unit="epochs", minimum=1
    )
    least_weight: float = setting(
        1.0,
        "share of the epochs in which a prompt that is always or never right is used; one of success s is used in a "
        "share 1 - (1 - least_weight) (2 s - 1)^2, so most often those that are right half the time; 1: all alike",
        minimum=0.0,
        maximum=1.0,
    )
    right_at: float = setting(1.0, "reward, before shaping, from which an answer counts as right")

    @property
    def is_on(self) -> bool:
        """True if any prompt can be left out."""
        return bool(self.path) or self.low > 0.0 or self.high < 1.0 or self.least_weight < 1.0


@dataclass
class DatasetConfig:
    """The prompts."""

    path: str = setting(
        "asyncrl.plugins.datasets.arithmetic:ArithmeticDataset",
        "dataset class by import path, a JSONL or Parquet file, a folder of them, a folder saved by `datasets`, or a "
        "name on the Hugging Face hub; docs/data.md",
        fixed=True,
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict, fixed=True)
    fields: dict[str, str] = setting(
        help="columns of a file under another name, `{prompt: question, answer: solution}`; a column within a column "
        "with a dot",
        factory=dict,
        fixed=True,
    )
    sources: list[SourceConfig] = setting(
        help="several datasets in place of path, mixed by weight; each with path, args, fields, weight and name",
        factory=list,
        fixed=True,
    )
    shuffle: bool = setting(
        True, "each epoch in a different order, from the seed; false: rows in their order, in every epoch", fixed=True
    )
    max_prompt_tokens: int = setting(2048, "longest prompt, its chat template counted", unit="tokens", minimum=1)
    overlong: Overlong = setting(
        Overlong.filter,
        "what becomes of longer prompts: their rows are left out, their text is cut (left, right, middle), or the run "
        "is refused",
    )
    chat_template: str = setting(
        AUTO, "auto: the tokenizer's, where it has one; off: prompts are plain text; or a Jinja file"
    )
    chat_template_args: dict[str, Any] = setting(
        help="further variables of the chat template, as `{enable_thinking: false}`", factory=dict
    )
    system_prompt: str = setting("", "system message put before prompts that have none; empty: no such message")
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
