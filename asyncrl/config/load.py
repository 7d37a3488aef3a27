"""From an experiment's name and overrides to a resolved config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, SettingInfo, setting_info
from asyncrl.trainer.supervised.settings import SFTConfig

Config = ExperimentConfig | SFTConfig

SCHEMAS: dict[str, type[Config]] = {"experiment_schema": ExperimentConfig, "sft_schema": SFTConfig}
"""What an experiment's `defaults:` list begins with, and the dataclass it stands for."""

_NO_CHOICE = re.compile(r"Invalid value '(?P<value>.*)', expected one of \[(?P<choices>.*)\]")
"""OmegaConf's message about a value that an enum does not have."""


def experiments_dir() -> Path:
    """The folder of the built-in experiments: inside the installed package, or beside it in a source tree."""
    installed = Path(__file__).resolve().parents[1] / "experiments"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "experiments"


def known_experiments(folder: Path) -> dict[str, str]:
    """Experiment names in `folder`, each with the comment on its first line."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        first_line = file.read_text().splitlines()[0] if file.stat().st_size else ""
        found[file.stem] = first_line.lstrip("# ").strip()
    return found


def load_experiment(name: str, overrides: Sequence[str], folder: Path | None = None) -> Config:
    """Compose experiment `name` of `folder` (default: the built-in ones) with `overrides` and check every value's type.

    `${here:}` in an experiment's file stands for its folder.

    Raises:
        ConfigError: no such experiment, a malformed override, an unknown setting, or a value of the wrong type.
    """
    folder = (folder or experiments_dir()).expanduser().resolve()
    known = known_experiments(folder)
    if name not in known:
        raise ConfigError(f"no experiment {name!r} in {folder}; {_nearest(name, known)}known: {', '.join(known)}")
    store = ConfigStore.instance()
    for schema_name, schema in SCHEMAS.items():
        store.store(name=schema_name, node=schema)
    GlobalHydra.instance().clear()
    OmegaConf.register_new_resolver("here", lambda: str(folder), replace=True)
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            base = OmegaConf.to_object(compose(name))
            parsed = [_checked_override(text, type(base)) for text in overrides]
            config: Any = OmegaConf.to_object(compose(name, overrides=parsed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    if not isinstance(config, (ExperimentConfig, SFTConfig)):
        raise ConfigError(f"experiment {name!r}: its defaults list must begin with one of {', '.join(SCHEMAS)}")
    return config


def load_supervised(name: str, folder: Path | None = None) -> SFTConfig:
    """Experiment `name`, which makes a base model.

    Raises:
        ConfigError: as `load_experiment`, or it is no supervised experiment.
    """
    config = load_experiment(name, [], folder)
    if not isinstance(config, SFTConfig):
        raise ConfigError(f"experiment {name!r} makes no base model: it is not supervised; use sft or one like it")
    return config


def settings(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, SettingInfo]]:
    """Every setting below `schema` as (dotted path, type, info), in the order of the definition."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        path = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from settings(hints[item.name], f"{path}.")
        else:
            yield path, hints[item.name], setting_info(item)


def _checked_override(text: str, schema: type[Any]) -> str:
    """`text` as Hydra wants it: keys below a free-form mapping are added without the user writing `+`.

    Raises:
        ConfigError: it is not `setting=value`, or names no setting.
    """
    text, override = _parsed(text)
    key = override.key_or_group
    known = {path: kind for path, kind, _ in settings(schema)}
    groups = {path.rpartition(".")[0] for path in known}
    if key in known:
        return f"++{text}" if _is_mapping(known[key]) and not text.startswith(("+", "~")) else text
    parents = [path for path, kind in known.items() if key.startswith(f"{path}.") and _is_mapping(kind)]
    if parents:
        return text if text.startswith(("+", "~")) else f"++{text}"
    if key in groups:
        inside = ", ".join(path for path in known if path.startswith(f"{key}."))
        raise ConfigError(f"{key} is a group of settings and takes no value; settings in it: {inside}")
    raise ConfigError(f"unknown setting {key!r} in {text!r}; {_nearest(key, known)}--help lists all of them")


def _parsed(text: str) -> tuple[str, Override]:
    """The override and its text; a value that Hydra's grammar refuses, such as `~/runs`, is taken as a string.

    Raises:
        ConfigError: it is not `setting=value`.
    """
    key, equals, value = text.partition("=")
    quoted = "{}='{}'".format(key, value.replace("'", "\\'"))
    first_error: HydraException | None = None
    for candidate in (text, quoted) if equals else (text,):
        try:
            return candidate, OverridesParser.create().parse_override(candidate)
        except HydraException as error:
            first_error = first_error or error
    raise ConfigError(f"override {text!r} is not setting=value: {str(first_error).splitlines()[0]}") from first_error


def _is_mapping(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is dict


def _nearest(name: str, known: Iterator[str] | Sequence[str] | dict[str, Any]) -> str:
    candidates = list(known)
    leaves = {path.rpartition(".")[2]: path for path in candidates}
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    match = match or [leaves[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)]
    return f"did you mean {match[0]!r}? " if match else ""


def _explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's message on one line, beginning with the setting's full name."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = str(cause).splitlines()[0]
    full_key = cause.full_key if isinstance(cause, OmegaConfBaseException) else None
    if no_choice := _NO_CHOICE.fullmatch(message):
        return f"{full_key}={no_choice['value']!r}: not a choice; choose one of {no_choice['choices']}"
    return f"{full_key}: {message}; --help gives its type and choices" if full_key else message
