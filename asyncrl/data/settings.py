"""Settings of the prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from asyncrl.config.setting import setting

AUTO, OFF = "auto", "off"
"""Values of `dataset.chat_template` that name no file."""
IMAGE_FIELDS = ("images", "image")
"""Columns of a row that hold pictures."""
JSONL, PARQUET = ".jsonl", ".parquet"
"""Suffixes of supported files."""


def is_data_path(path: str) -> bool:
    """True if `path` is a folder or, by its name, a supported file."""
    return path.endswith((JSONL, PARQUET)) or Path(path).expanduser().is_dir()


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
    weight: float = setting(1.0, "weight of the source; its share of an epoch's rows is weight / sum of all weights")
    name: str = setting("", "name in the field `source` of its rows; empty: its path")


@dataclass
class CurriculumConfig:
    """Prompts that are too easy or too hard are left out of some epochs; docs/data.md."""

    path: str = setting(
        "",
        "import path of your class that decides in place of low, high and skip_epochs (asyncrl.api.Curriculum); "
        "empty: none",
    )
    args: dict[str, Any] = setting(help="keyword arguments of its constructor", factory=dict)
    low: float = setting(
        0.0,
        "least share of right answers with which a prompt is used in every epoch; with less it is skipped",
        minimum=0.0,
        maximum=1.0,
    )
    high: float = setting(
        1.0,
        "largest share of right answers with which a prompt is used in every epoch; with more it is skipped",
        minimum=0.0,
        maximum=1.0,
    )
    skip_epochs: int = setting(
        2,
        "epochs in which a prompt outside low to high is left out; then it is used and measured again",
        unit="epochs",
        minimum=1,
    )
    least_weight: float = setting(
        1.0,
        "share of the epochs in which a prompt that is always or never right is used. A prompt with the share s of "
        "right answers is used in a share 1 - (1 - least_weight) (2 s - 1)^2, so most often with s = 1/2. 1: all alike",
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
        help="columns of a file by the names that asyncrl and rewards use, for example {prompt: question, answer: "
        "solution}; a nested column is named with a dot",
        factory=dict,
        fixed=True,
    )
    sources: list[SourceConfig] = setting(
        help="several datasets, which replace path, args and fields, mixed by weight; each has path, args, fields, "
        "weight and name",
        factory=list,
        fixed=True,
    )
    shuffle: bool = setting(
        True, "each epoch in a different order, from the seed; false: rows in their order, in every epoch", fixed=True
    )
    max_prompt_tokens: int = setting(
        2048,
        "longest prompt, including its chat template; overlong says what happens to longer ones",
        unit="tokens",
        minimum=1,
    )
    overlong: Overlong = setting(
        Overlong.filter,
        "treatment of longer prompts. filter: the row is left out; left, right, middle: this part of the text is cut; "
        "refuse: the run does not start",
    )
    chat_template: str = setting(
        AUTO,
        "chat template of prompts. auto: the tokenizer's, if it has one; off: prompts are plain text; or a Jinja file",
    )
    chat_template_args: dict[str, Any] = setting(
        help="further variables of the chat template, for example {enable_thinking: false}", factory=dict
    )
    system_prompt: str = setting("", "system message put before prompts that have none; empty: no such message")
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
