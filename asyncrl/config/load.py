"""Load the resolved config of an experiment, given by name and overrides.

An experiment is a YAML file. Its `defaults:` list names the experiments that it is based on, the first of them
`experiment_schema` or `sft_schema`; later files win over earlier ones, the command line over all files. Hydra composes
them; types and bounds are msgspec's.

The group `my` holds settings of the user's code, checked by the dataclass that `my_class` names. Other settings use
them: `reward.args={scale: "${my.scale}"}`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from asyncrl.comm.typed import convert
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.secrets import hide, shown
from asyncrl.config.setting import ConfigError, SettingInfo, did_you_mean, setting_info
from asyncrl.config.values import Plain, fit, members_of, place, read_file, read_typed, text_of
from asyncrl.trainer.supervised.settings import SFTConfig

Config = ExperimentConfig | SFTConfig
SCHEMAS: dict[str, type[Config]] = {"experiment_schema": ExperimentConfig, "sft_schema": SFTConfig}
"""First entry of an experiment's `defaults:` list, and its dataclass."""
_Given = tuple[str, Any]
"""A setting, and its value as it was given."""
_REMOVED = object()
"""Value of an entry that is taken out of a mapping: `~agent.args.tries`."""
_NUMBER = "\x00"
"""Begins what Hydra sees of a value, and is the key of the schema."""


def experiments_dir() -> Path:
    """Return the folder of the built-in experiments: inside the installed package, or beside it in a source tree."""
    installed = Path(__file__).resolve().parents[1] / "experiments"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "experiments"


def recipes_dir() -> Path:
    """Return the folder of the built-in recipes, which lie apart from the experiments that a user would begin with."""
    return experiments_dir() / "recipes"


def experiment_folders(own: Path | None) -> list[Path]:
    """Return the folders in which a name is searched: the user's `own` folder, if there is one, that of the built-in
    experiments, that of the built-in recipes.

    Raises:
        ConfigError: there is no such folder.
    """
    built_in = [experiments_dir(), recipes_dir()]
    if own is None:
        return built_in
    if not own.expanduser().is_dir():
        raise ConfigError(f"--config-dir {str(own)!r}: no such folder; give the one that holds your experiments' files")
    return [own.expanduser().resolve(), *built_in]


def known_experiments(folder: Path) -> dict[str, str]:
    """Return the experiment names in `folder`, each with the comment on its first line."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        first_line, _, _ = file.read_text(encoding="utf-8", errors="replace").partition("\n")
        found[file.stem] = first_line.lstrip("# ").strip()
    return found


def load_experiment(
    name: str,
    overrides: Sequence[str],
    folder: Path | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    commands: Sequence[str] = (),
) -> Config:
    """Compose experiment `name` with `overrides` and `values`, and check every value's type.

    The experiment, and every entry of its defaults list, is searched in the user's `folder`, then among the built-in
    ones. `${here:}` in an experiment's file stands for that file's folder.

    Args:
        overrides: `setting=value` texts, as on the command line.
        values: Python values by their settings, applied after `overrides`.
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
    schema, files, wrong = _composed(name, tuple(folders))
    wrong, given = list(wrong), list(files)
    for text in overrides:
        try:
            given.append(_typed(text, schema))
        except ConfigError as error:
            wrong.append(str(error))
    given += _settings_in(values or {}, schema, "", wrong)
    return _made(schema, given, wrong)


def _names_in(folders: Iterable[Path]) -> list[str]:
    return list(dict.fromkeys(name for folder in folders for name in known_experiments(folder)))


def _composed(name: str, folders: tuple[Path, ...]) -> tuple[type[Config], list[_Given], list[str]]:
    """Return an experiment's schema, the settings that its files give, and what is wrong with them.

    Hydra composes the files by their defaults lists. In place of each value it has the value's number: what a value
    means depends on its setting (`asyncrl.config.values`).

    Raises:
        ConfigError: a file is not valid, or is based on an unknown experiment.
    """
    contents, unreadable = _contents(folders)
    values: list[Any] = []

    def packed(content: Any) -> Any:
        if isinstance(content, dict):
            return {key if isinstance(key, str) else packed(key): packed(each) for key, each in content.items()}
        values.append(content)
        return f"{_NUMBER}{len(values) - 1}"

    def unpacked(content: Any) -> Any:
        if isinstance(content, dict):
            return {unpacked(key) if key.startswith(_NUMBER) else key: unpacked(each) for key, each in content.items()}
        return values[int(content.removeprefix(_NUMBER))]

    nodes: dict[str, Any] = {schema: {_NUMBER: {schema: ""}} for schema in SCHEMAS}
    for entry, (defaults, content) in contents.items():
        nodes[entry] = {"defaults": defaults, **packed(content)}
    try:
        composed: Any = OmegaConf.to_container(_by_hydra(name, nodes))
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        if missing in unreadable:
            raise ConfigError(f"experiment {name!r}: {unreadable[missing]}") from error
        known = (*SCHEMAS, *_names_in(folders))
        hint = f"{did_you_mean(missing, known)}; known: {', '.join(known)}"
        raise ConfigError(f"experiment {name!r}: its defaults list names an unknown {missing!r}{hint}") from error
    except RecursionError as error:
        raise ConfigError(
            f"experiment {name!r}: its defaults lists form a circle; your file with a built-in experiment's name "
            f"replaces that experiment everywhere and cannot be based on it: give it another name"
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"experiment {name!r}: {' '.join(str(error).split())}") from error
    schemas, wrong = list(composed.pop(_NUMBER, {})), list[str]()
    if len(schemas) != 1:
        raise ConfigError(f"experiment {name!r}: its defaults list must begin with one of {', '.join(SCHEMAS)}")
    schema = SCHEMAS[schemas[0]]
    given = _settings_in(unpacked(composed), schema, "", wrong)
    for entry, (_, content) in contents.items() if wrong else ():  # which file says so
        here: tuple[list[str], list[str]] = [], []
        for where, lines in zip(("", f" in {entry}.yaml"), here, strict=True):
            _settings_in(content, schema, where, lines)
        located = dict(zip(*here, strict=True))
        wrong = [located.get(line, line) for line in wrong]
    return schema, given, wrong


def _by_hydra(name: str, nodes: Mapping[str, Any]) -> DictConfig:
    """Compose `name` of `nodes`. A program that calls this may use Hydra itself: its state stays as it is."""
    main, store = GlobalHydra.instance(), ConfigStore.instance()
    before, stored = main.hydra, store.repo
    main.clear()
    store.repo = dict(stored)
    try:
        for entry, node in nodes.items():
            store.store(entry, node)
        # A package without YAML files: what is composed is in the store alone.
        with initialize_config_module(str(__package__), version_base="1.3"):
            return compose(name)
    finally:
        GlobalHydra.set_instance(main)
        main.hydra, store.repo = before, stored


def _contents(folders: Sequence[Path]) -> tuple[dict[str, tuple[list[Any], dict[Any, Any]]], dict[str, str]]:
    """Return the defaults list and the settings of each experiment's file by name, the user's in place of the built-in
    one of the same name; and what is wrong with files that cannot be read.
    """
    contents: dict[str, tuple[list[Any], dict[Any, Any]]] = {}
    unreadable: dict[str, str] = {}
    for entry in _names_in(folders):
        file = next(folder / f"{entry}.yaml" for folder in folders if (folder / f"{entry}.yaml").exists())
        try:
            content = read_file(file)
        except (YAMLError, UnicodeDecodeError) as error:
            unreadable[entry] = (
                f"{file} is not valid YAML: {' '.join(str(error).split())}; put texts with special characters in quotes"
            )
            continue
        if not isinstance(content, dict):
            unreadable[entry] = f"{file} has no settings; write SETTING: VALUE in each line"
            continue
        defaults = content.pop("defaults", [])
        if isinstance(defaults, list):
            contents[entry] = defaults, content
        else:
            unreadable[entry] = f"{file}: write names of experiments as defaults: [own_model, _self_]"
    return contents, unreadable


def _settings_in(content: Mapping[Any, Any], schema: type[Config], where: str, wrong: list[str]) -> list[_Given]:
    """Return the settings that nested mappings give; add those that do not exist to `wrong`."""
    known, found = _kinds(schema), list[_Given]()  # type: ignore[arg-type]  # types are hashable

    def look(path: str, value: Any) -> None:
        inside = [other for other in known if other.startswith(f"{path}.")]
        if _kind_at(path, known) is not None:
            found.append((path, value))
        elif isinstance(value, Mapping) and (value or inside):
            for key, each in value.items():
                look(f"{path}.{text_of(key)}", each)
        else:
            from asyncrl.config.aliases import unknown_setting

            wrong.append(_takes_no_value(path, inside) if inside else unknown_setting(path, known, where, value))

    for key, each in content.items():
        look(text_of(key), each)
    return found


def _typed(text: str, schema: type[Config]) -> _Given:
    """Return the setting and its value as typed in `setting=value`.

    Raises:
        ConfigError: it is not `setting=value`, or names no setting.
    """
    name, equals, value = text.partition("=")
    removed, name = name.startswith("~"), name.strip().lstrip("+~")
    known = _kinds(schema)  # type: ignore[arg-type]  # types are hashable
    if not name:
        raise ConfigError(f"override {text!r} names no setting; write setting=value, without spaces around =")
    if not equals and not removed:
        raise ConfigError(f"override {text!r} is not setting=value")
    kind = _kind_at(name, known)
    if kind is None:
        inside = [path for path in known if path.startswith(f"{name}.")]
        whole = next((path for path in known if name.startswith((f"{path}.", f"{path}["))), None)
        if inside:
            raise ConfigError(_takes_no_value(name, inside))
        if whole is not None:
            raise ConfigError(f"override {hide(text)!r}: {whole} is set as a whole; write {whole}=VALUE")
        from asyncrl.config.aliases import unknown_setting

        raise ConfigError(unknown_setting(name, known, f" in {hide(text)!r}", read_typed(value, Any)))
    if removed:
        if name in known and get_origin(known[name]) is not dict:
            raise ConfigError(f"override {text!r}: a setting cannot be removed; give it a value as {name}=VALUE")
        return name, _REMOVED
    try:
        return name, read_typed(value, kind)
    except ConfigError as error:
        raise ConfigError(f"{name}={shown(name, value)}: {error}") from error


def _takes_no_value(group: str, inside: Iterable[str]) -> str:
    return f"{group} is a group of settings and takes no value; settings in it: {', '.join(inside)}"


def _made(schema: type[Config], given: Sequence[_Given], wrong: list[str]) -> Config:
    """Return the defaults of `schema` with the settings `given`, of which later ones win.

    Raises:
        ConfigError: there is something in `wrong`, or a value is not of its setting's type.
    """
    kinds, defaults = dict(_kinds(schema)), _defaults(schema)  # type: ignore[arg-type]  # types are hashable
    tree = copy.deepcopy(defaults)
    own = next((value for name, value in reversed(given) if name == "my_class"), None)
    path, mine = fit("my_class", own, str | None, []), None
    try:
        kinds["my"] = mine = _own_class(path) if path else None
    except ConfigError as error:
        wrong.append(str(error))
    kinds["my"] = kinds["my"] or dict[str, Any]
    for name, value in given:
        kind = _kind_at(name, kinds)
        if kind is None:
            names = [item.name for item in fields(kinds["my"])]
            hint = did_you_mean(name.partition(".")[2], names) or "."
            wrong.append(f"{name}: {path!r} has no such field{hint} It has: {', '.join(names)}")
        elif value is _REMOVED:
            _remove(tree, name, wrong)
        elif name in kinds and kind is str and isinstance(value, Plain) and value.value is None:
            place(tree, name.split("."), reduce(getitem, name.split("."), defaults))  # a file's null: not set
        else:
            place(tree, name.split("."), fit(name, value, kind, wrong))
    if not wrong and mine is not None:
        tree["my"], kinds["my"] = _own_settings(str(path), mine, tree["my"]), dict[str, Any]
    elif not wrong and tree.get("my"):
        raise ConfigError(f"my={tree['my']}: its fields are not defined; name your dataclass: my_class=FILE.py:NAME")
    if not wrong:
        tree = _resolved(tree, kinds, wrong)
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(wrong)))
    return convert(tree, schema)


def _remove(tree: Any, name: str, wrong: list[str]) -> None:
    *above, last = name.split(".")
    for part in above:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or last not in tree:
        wrong.append(f"override '~{name}': it is not set")
    elif above and isinstance(tree[last], dict):
        tree[last] = {}
    else:
        del tree[last]


def _own_class(path: str) -> type:
    """Return the dataclass that `my_class=path` names.

    Raises:
        ConfigError: there is none, or it is not a dataclass.
    """
    try:
        schema = load_plugin(path)
    except PluginError as error:
        raise ConfigError(f"my_class={error}") from error
    if not is_dataclass(schema) or not isinstance(schema, type):
        raise ConfigError(f"my_class={path!r}: {schema!r:.80} is not a dataclass; add @dataclass")
    return schema


def _own_settings(path: str, schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `given` for the dataclass `schema`, completed with its defaults.

    Raises:
        ConfigError: a value is missing or of another type.
    """
    try:
        checked = OmegaConf.merge(OmegaConf.structured(schema), given)
    except OmegaConfBaseException as error:
        raise ConfigError(f"my.{error.full_key}: {str(error).splitlines()[0]} (my_class={path!r})") from error
    assert isinstance(checked, DictConfig)
    if missing := sorted(OmegaConf.missing_keys(checked)):
        raise ConfigError("\n".join(f"my.{name}: it has no default in {path!r}; set it" for name in missing))
    made = OmegaConf.to_container(checked, resolve=False, enum_to_str=True)
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def _resolved(tree: dict[str, Any], kinds: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
    """Return the settings with the values that references such as `${my.scale}` stand for."""
    if "${" not in str(tree):
        return tree
    for name, value in _texts(tree):
        try:
            OmegaConf.create({"x": value})
        except OmegaConfBaseException:
            wrong.append(f"{name}={shown(name, value)}: not a valid reference; for a text with ${{ write \\${{")
    if wrong:
        return tree
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}; for a text with ${{ write \\${{") from error
    assert isinstance(resolved, dict)
    made: dict[str, Any] = {}
    for name, kind in kinds.items():
        found = reduce(getitem, name.split("."), resolved)
        place(made, name.split("."), fit(name, found, kind, wrong))
    return made


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts that have a reference, with the names of their settings."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _texts(each, f"{name}[{number}]")
    elif isinstance(value, str) and "${" in value:
        yield name, value


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
def _kinds(schema: Any) -> dict[str, Any]:
    """Return the type of every setting below `schema`."""
    return {path: kind for path, kind, _ in settings(schema)}


@cache
def _defaults(schema: Any) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(schema())
    return made


def _kind_at(name: str, kinds: Mapping[str, Any]) -> Any:
    """Return the type of a setting, or of a value within one (`agent.args.tries`); None if there is none."""
    if name in kinds:
        return kinds[name]
    above, _, last = name.rpartition(".")
    if not above or (kind := _kind_at(above, kinds)) is None:
        return None
    *_, inner = (member for member in members_of(kind) if member is not type(None))
    if get_origin(inner) is dict:
        return get_args(inner)[1]
    if isinstance(inner, type) and is_dataclass(inner):
        return get_type_hints(inner).get(last)
    return Any if inner is Any else None
