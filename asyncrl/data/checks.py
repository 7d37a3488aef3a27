"""Checks of the settings that name prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.config.plugin_code.import_paths import path_problems
from asyncrl.data.settings import AUTO, JSONL, OFF, PARQUET, DatasetConfig, is_data_path
from asyncrl.rollout.settings import EvalConfig


def check(data: DatasetConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `dataset`."""
    yield from _paths(data)
    yield from _chat(data)


def source_problems(group: str, path: str) -> Iterator[str]:
    """Yield an error message for each problem with `<group>.path` that shows without loading the dataset."""
    if is_data_path(path):
        if not Path(path).expanduser().exists():
            yield f"{group}.path={path!r}: no such file; give a data file, or a dataset class as package.module:Name"
    elif ":" in path:
        yield from path_problems(group, path)
    else:
        yield (
            f"{group}.path={path!r}: give a file that ends in {JSONL} or {PARQUET}, a folder, or a dataset class as "
            "package.module:Name"
        )


def _paths(data: DatasetConfig) -> Iterator[str]:
    """Yield an error message for each problem with the path or the sources of `dataset`, and with their fields."""
    curriculum = data.curriculum
    if curriculum.path:
        yield from path_problems("dataset.curriculum", curriculum.path)
        if curriculum.low > 0.0 or curriculum.high < 1.0 or curriculum.least_weight < 1.0:
            yield (
                f"dataset.curriculum.path={curriculum.path!r}: low, high and least_weight are the built-in "
                "curriculum's; leave them out"
            )
    elif curriculum.args:
        yield f"dataset.curriculum.args={curriculum.args}: there is no class to take them; give dataset.curriculum.path"
    if data.curriculum.low > data.curriculum.high:
        yield (
            f"dataset.curriculum.low={data.curriculum.low}: above dataset.curriculum.high={data.curriculum.high}, so "
            "that no prompt is within; exchange them"
        )
    if not data.sources:
        yield from source_problems("dataset", data.path)
        yield from field_problems("dataset", data.path, data.fields)
        return
    default = DatasetConfig()
    for name in ("path", "args", "fields"):
        if (value := getattr(data, name)) != getattr(default, name):
            yield (
                f"dataset.{name}={value!r}: set together with dataset.sources, each of which has its own; write it "
                "there"
            )
    names: set[str] = set()
    for number, source in enumerate(data.sources):
        group, name = f"dataset.sources[{number}]", source.name or source.path
        if not (math.isfinite(source.weight) and source.weight > 0):
            yield f"{group}.weight={source.weight}: no share; give a number above 0"
        if name in names:
            yield f"{group}.name={source.name!r}: another source is called {name!r} too; give each a different name"
        names.add(name)
        yield from source_problems(group, source.path)
        yield from field_problems(group, source.path, source.fields)


def field_problems(group: str, path: str, fields: Mapping[str, str]) -> Iterator[str]:
    if fields and not is_data_path(path):
        yield f"{group}.fields={dict(fields)}: {path!r} is a class, not a file; name its rows' fields there"


def _chat(data: DatasetConfig) -> Iterator[str]:
    template = data.chat_template
    if template not in (AUTO, OFF) and not Path(template).expanduser().is_file():
        yield f"dataset.chat_template={template!r}: no such file; give auto, off, or a Jinja file"
    if template == OFF:
        for name in ("system_prompt", "chat_template_args"):
            if value := getattr(data, name):
                yield f"dataset.{name}={value!r}: nothing takes it with dataset.chat_template=off; leave it out"


def held_out_problems(data: DatasetConfig, evaluation: EvalConfig) -> Iterator[str]:
    """Yield an error message if evaluation would use rows of the training file that are trained on."""
    args = evaluation.args
    if not is_data_path(data.path) or "path" in args:
        return
    if not data.args.get("held_out_share"):
        yield (
            f"eval.path=null: evaluation would take the training file {data.path!r} itself; give it a file of its own "
            "(eval.path=...), hold out a share of this one (dataset.args.held_out_share=0.05), or switch it off "
            "(eval.interval=0)"
        )
    for key in ("held_out_share", "prompt_template", "files"):
        if args.get(key, data.args.get(key)) != data.args.get(key):
            yield (
                f"eval.args.{key}={args[key]!r}: it decides which prompts are held out, and training has another; set "
                f"dataset.args.{key} to the same, or give evaluation a file of its own with eval.path"
            )
