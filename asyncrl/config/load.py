"""Load the resolved config of an experiment, given by name and overrides."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from hydra import compose, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf reads files with it

from asyncrl.config.aliases import RENAMED, answer, elsewhere
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.own_settings import complete_own_settings
from asyncrl.config.setting import ConfigError, SettingInfo, not_a_choice, setting_info
from asyncrl.config.suggestions import did_you_mean, nearest_setting
from asyncrl.trainer.supervised.settings import SFTConfig

Config = ExperimentConfig | SFTConfig

SCHEMAS: dict[str, type[Config]] = {"experiment_schema": ExperimentConfig, "sft_schema": SFTConfig}
"""First entry of an experiment's `defaults:` list, and its dataclass."""

HERE = "${here:}"
"""Text that stands for an experiment file's own folder."""

_NO_CHOICE = re.compile(r"Invalid value '(?P<value>.*)', expected one of \[(?P<choices>.*)\]")
"""OmegaConf's message about a value that an enum does not have."""


class ExperimentFiles(FileConfigSource):
    """Hydra's source of YAML files; replaces `HERE` in each file by the file's folder."""

    @staticmethod
    def scheme() -> str:
        return "experiments"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the file with its folder in place of `HERE`."""
        result = super().load_config(config_path)
        folder = Path(self.path, config_path).parent
        result.config = OmegaConf.create(OmegaConf.to_yaml(result.config).replace(HERE, str(folder)))
        return result


class ExperimentFolders(SearchPathPlugin):
    """Makes Hydra search `folders` for experiments. A file in an earlier folder wins over one of the same name."""

    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append("asyncrl", f"{ExperimentFiles.scheme()}://{folder}")


Plugins.instance().register(ExperimentFiles)
Plugins.instance().register(ExperimentFolders)


def experiments_dir() -> Path:
    """Return the folder of the built-in experiments: inside the installed package, or beside it in a source tree."""
    installed = Path(__file__).resolve().parents[1] / "experiments"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "experiments"


def experiment_folders(own: Path | None) -> list[Path]:
    """Return the folders of experiments: the user's `own` folder, if there is one, then that of the built-in ones.

    Raises:
        ConfigError: there is no such folder.
    """
    if own is None:
        return [experiments_dir()]
    if not own.expanduser().is_dir():
        raise ConfigError(f"--config-dir {str(own)!r}: no such folder; give the one that holds your experiments' files")
    return [own.expanduser().resolve(), experiments_dir()]


def known_experiments(folder: Path) -> dict[str, str]:
    """Return the experiment names in `folder`, each with the comment on its first line."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        first_line, _, _ = file.read_text(encoding="utf-8", errors="replace").partition("\n")
        found[file.stem] = first_line.lstrip("# ").strip()
    return found


def load_experiment(
    name: str, overrides: Sequence[str], folder: Path | None = None, *, commands: Sequence[str] = ()
) -> Config:
    """Compose experiment `name` with `overrides` and check every value's type.

    The experiment, and every entry of its defaults list, is searched in the user's `folder`, then among the built-in
    ones.
    `${here:}` in an experiment's file stands for that file's folder.

    Args:
        commands: names of commands, of which `name` may be a misspelling.

    Raises:
        ConfigError: no such experiment, a malformed override, an unknown setting, or a value of the wrong type; one
            line for each.
    """
    folders = experiment_folders(folder)
    known = _names_in(folders)
    if name not in known:
        where = " or ".join(map(str, folders))
        neither = f"no experiment {name!r} in {where}" + (", and no such command" if commands else "")
        hint = did_you_mean(name, (*known, *commands))
        listed = f"known: {', '.join(known)}" + (f"; commands: {', '.join(commands)}" if commands else "")
        raise ConfigError(f"{neither}{hint} {listed}" if hint else f"{neither}; {listed}")
    _store_schemas()
    ExperimentFolders.folders = folders
    with _hydra():
        base, schema = _compose(name)
    accepted, wrong = [], []
    for text in overrides:
        try:
            accepted.append(_checked_override(text, schema))
        except ConfigError as error:
            wrong.append(str(error))
    try:
        config = _overridden(base, accepted)
    except ConfigError as error:
        wrong += [line for text in accepted for line in _refusal(base, text)] or [str(error)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return config


@contextmanager
def _hydra() -> Iterator[None]:
    """Make Hydra search `ExperimentFolders.folders` only. `hydra.initialize` is avoided: it looks for its caller's file
    among all loaded modules, which takes longer than composing an experiment.
    """
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("asyncrl", create_config_search_path(None))
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


@cache
def _store_schemas() -> None:
    """Register the schemas for defaults lists once. This takes as long as the rest of loading an experiment."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=name, node=schema)


def _names_in(folders: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(name for folder in folders for name in known_experiments(folder)))


def _compose(name: str) -> tuple[DictConfig, type[Config]]:
    """Return the experiment as composed from its files, and the schema that it begins with."""
    try:
        config = compose(name)
    except MissingConfigException as error:
        missing, known = error.missing_cfg_file, _names_in(ExperimentFolders.folders)
        hint = f"{did_you_mean(str(missing), known)}; known: {', '.join((*SCHEMAS, *known))}"
        raise ConfigError(f"experiment {name!r}: its defaults list names an unknown {missing!r}{hint}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"experiment {name!r}: its file, or one that it is based on, is not valid YAML: {reason}"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"experiment {name!r}: its defaults lists form a circle; your file with a built-in experiment's name "
            f"replaces that experiment everywhere and cannot be based on it: give it another name"
        ) from error
    for schema in SCHEMAS.values():
        if OmegaConf.get_type(config) is schema:
            return config, schema
    raise ConfigError(f"experiment {name!r}: its defaults list must begin with one of {', '.join(SCHEMAS)}")


def _overridden(base: DictConfig, overrides: list[str], *, alone: bool = False) -> Config:
    """Apply overrides to `base` like Hydra, without composing the experiment a second time.

    Args:
        alone: apply an override by itself, without those that name the class of `my`.

    Raises:
        ConfigError: a value is not of its setting's type.
    """
    config = copy.deepcopy(base)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), config)
        if "my" in config and not alone:
            complete_own_settings(config)
        made: Config = OmegaConf.to_object(config)  # type: ignore[assignment]  # `_compose` looked at its type
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    return made


def _refusal(base: DictConfig, override: str) -> list[str]:
    """Return the reason why `override` alone is refused; an empty list if it is accepted."""
    try:
        _overridden(base, [override], alone=True)
    except ConfigError as error:
        setting = override.lstrip("+~").partition("=")[0]
        return [str(error) if setting in str(error) else f"{setting}: {error}"]  # of a field within a list
    return []


def load_supervised(name: str, folder: Path | None = None) -> SFTConfig:
    """Load the supervised experiment `name`, which trains a base model.

    Raises:
        ConfigError: as for `load_experiment`, or the experiment is not supervised.
    """
    config = load_experiment(name, [], folder)
    if not isinstance(config, SFTConfig):
        raise ConfigError(f"experiment {name!r} makes no base model: it is not supervised; use sft or one like it")
    return config


def settings(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, SettingInfo]]:
    """Yield every setting below `schema` as (dotted path, type, info), in the order of the definition."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        path = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from settings(hints[item.name], f"{path}.")
        else:
            yield path, hints[item.name], setting_info(item)


@cache
def _kinds(schema: type[Any]) -> dict[str, Any]:
    """Return the type of every setting below `schema`."""
    return {path: kind for path, kind, _ in settings(schema)}


def _checked_override(text: str, schema: type[Any]) -> str:
    """Return the override in Hydra's form: adds the `+` to keys below a free-form mapping.

    Raises:
        ConfigError: it is not `setting=value`, or names no setting.
    """
    text, override = _parsed(text)
    key = override.key_or_group
    known = _kinds(schema)  # type: ignore[arg-type]  # types are hashable
    if override.is_sweep_override():
        raise ConfigError(
            f"override {text!r}: several values; give one, or a list as {key}=[1,2] where it takes a list"
        )
    if override.is_delete() and key in known and not _is_mapping(known[key]):
        raise ConfigError(f"override {text!r}: a setting cannot be removed; give it a value as {key}=VALUE")
    groups = {path.rpartition(".")[0] for path in known}
    if key in known:
        return f"++{text}" if _is_mapping(known[key]) and not text.startswith(("+", "~")) else text
    parents = [path for path, kind in known.items() if key.startswith(f"{path}.") and _is_mapping(kind)]
    if parents:
        return text if text.startswith(("+", "~")) else f"++{text}"
    if key in groups:
        inside = ", ".join(path for path in known if path.startswith(f"{key}."))
        raise ConfigError(f"{key} is a group of settings and takes no value; settings in it: {inside}")
    raise ConfigError(_unknown_setting(key, known, f" in {text!r}", str(override.value())))


def _unknown_setting(name: str, known: Iterable[str], where: str = "", value: str = "") -> str:
    if (now := RENAMED.get(name)) is not None:
        return f"unknown setting {name!r}{where}; it was renamed to {now!r}"
    if (alias := elsewhere(name)) is not None:
        return f"unknown setting {name!r}{where}; {answer(alias, value)} (docs/coming_from.md)"
    nearest = nearest_setting(name, known)
    hint = f"did you mean {nearest!r}? " if nearest else ""
    return f"unknown setting {name!r}{where}; {hint}--help lists all of them"


def _parsed(text: str) -> tuple[str, Override]:
    """Return the override and its text. A value that Hydra's grammar refuses, such as `~/runs`, becomes a string.

    Raises:
        ConfigError: it is not `setting=value`.
    """
    key, equals, value = text.partition("=")
    if not key.strip():
        raise ConfigError(f"override {text!r} names no setting; write setting=value, without spaces around =")
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


def _explain(error: BaseException) -> str:
    """Return Hydra's or OmegaConf's message on one line, beginning with the setting's full name."""
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    cause = next((e for e in chain if isinstance(e, OmegaConfBaseException) and e.full_key), None)
    message = str(cause or error).splitlines()[0]
    key = cause.full_key if cause is not None else None
    if key is None:
        return message
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        known = [path for schema in SCHEMAS.values() for path, _, _ in settings(schema)]
        return _unknown_setting(key, known)
    if no_choice := _NO_CHOICE.fullmatch(message):
        return not_a_choice(key, no_choice["value"], no_choice["choices"].split(", "))
    return f"{key}: {message}; --help gives its type and choices"
