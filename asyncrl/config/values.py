"""Values of settings as their users write them, and what each means for a setting of a given type.

Three sources: a YAML file (`read_file`), the command line (`read_typed`), and Python, whose objects are taken as they
are. A value that YAML would make a number, a boolean or null also has its source text (`Plain`), because a setting
whose type is text takes what was written: `trial_name=1.10` is "1.10", `revision: 007` is "007".

`fit` makes the value of the setting's type, or says in words of the settings what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml  # type: ignore[import-untyped]

from asyncrl.comm.typed import convert
from asyncrl.config.secrets import shown
from asyncrl.config.setting import ConfigError, did_you_mean, not_a_choice

T = TypeVar("T")
HERE = "${here:}"
"""Text that stands for an experiment file's own folder."""

_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_UNCLEAR = frozenset({"yes", "no", "on", "off"})
"""YAML 1.1 makes booleans of these words, YAML 1.2 texts. Where the setting does not decide, they are refused."""
_REFERENCE = re.compile(r"(\\*)\$\{")
_ONE = "several values; give one"
_MERGE = "tag:yaml.org,2002:merge"


class Plain(NamedTuple):
    """A number, boolean or null of a YAML text, written without quotes."""

    text: str
    value: Any


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML, in which `1e-6` is a number, and `007`, `12:30` and dates are texts."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)",
        list("-+0123456789."),
    ),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Puts every text in quotes of which a loader of YAML, also one of other rules, would make something else."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Loader.yaml_implicit_resolvers.get(first, [])
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }


def to_yaml(settings: Any) -> str:
    """Return plain data as YAML."""
    return str(yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def literal(settings: Any) -> Any:
    """Return resolved settings so that they can be read as an experiment: a `${` in a text is no reference."""
    if isinstance(settings, dict):
        return {key: literal(each) for key, each in settings.items()}
    if isinstance(settings, list):
        return [literal(each) for each in settings]
    return _REFERENCE.sub(r"\1\1\\${", settings) if isinstance(settings, str) else settings


def read_file(file: Path) -> Any:
    """Return the content of a YAML file as mappings, lists, texts and `Plain`; `HERE` in a text is the file's folder.

    Raises:
        yaml.YAMLError, UnicodeDecodeError: it is not valid YAML.
    """
    folder = literal(str(file.parent))
    with file.open(encoding="utf-8") as stream:
        return _read(stream, folder)


def read_typed(text: str, kind: Any) -> Any:
    """Return a value as typed on the command line for a setting of type `kind`.

    A text in brackets, braces or quotes is YAML: `[a, b]`, `{a: 1}`, `"\\n"`. Every other one is a single value, with
    all its characters. A setting of text takes brackets and braces literally.

    Raises:
        ConfigError: brackets, braces or quotes are not valid YAML.
    """
    is_text = members_of(kind) == [str]
    if text.lstrip().startswith(('"', "'") if is_text else ("[", "{", '"', "'")):
        try:
            read = _read(text, None)
        except yaml.YAMLError as error:
            if is_text:
                return text
            reason = " ".join(str(error).split()).partition(' in "<unicode string>"')[0]
            raise ConfigError(f"not valid YAML: {reason}; put texts with special characters in quotes") from error
        return text if is_text and not isinstance(read, str) else read
    if is_text or not text:
        return text
    loader = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text.strip(), (True, False)), text)
    value = loader.construct_object(node)
    return value if isinstance(value, str) else Plain(text, value)


def _read(source: Any, folder: str | None) -> Any:
    loader = _Loader(source)
    try:
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, folder)
    finally:
        loader.dispose()


def _value(loader: _Loader, node: yaml.Node, folder: str | None) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, each, folder) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        made: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged |= _merged(loader, value_node, folder)
                continue
            key, value = _entry(loader, key_node, value_node, folder)
            if key in made:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            made[key] = value
        return merged | made
    value = loader.construct_object(node)
    if isinstance(value, str):
        return value if folder is None else value.replace(HERE, folder)
    return Plain(node.value, value) if node.style is None else value


def _merged(loader: _Loader, node: yaml.Node, folder: str | None) -> dict[Any, Any]:
    """Return what `<<` adds to a mapping: the entries of a mapping, or of several, of which the first ones count."""
    made: dict[Any, Any] = {}
    for each in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(each, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "<< merges mappings alone", each.start_mark)
        made |= _value(loader, each, folder)
    return made


def _entry(loader: _Loader, key_node: yaml.Node, value_node: yaml.Node, folder: str | None) -> tuple[Any, Any]:
    """Return key and value of an entry; `{a:1}`, of which YAML makes a key `a:1` without a value, is `{a: 1}`."""
    if not isinstance(key_node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key is no single value", key_node.start_mark)
    key, absent = key_node.value, value_node.start_mark.index == value_node.end_mark.index
    if absent and key_node.style is None and folder is None:  # within braces of the command line
        key, colon, text = key.partition(":")
        if not colon:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} has no value", key_node.start_mark)
        return key, _read(text, None)
    value = loader.construct_object(key_node)
    is_number = key_node.style is None and isinstance(value, int | float) and not isinstance(value, bool)
    return Plain(key, value) if is_number else key, _value(loader, value_node, folder)


def fit(name: str, value: Any, kind: Any, wrong: list[str]) -> Any:
    """Return `value` as one of the type `kind` of the setting `name`; add what is wrong with it to `wrong`.

    A mapping for a group of settings stays a mapping of the settings that are given. References such as `${my.scale}`
    stay as they are.
    """
    if isinstance(value, str) and "${" in value:
        return value
    members = members_of(kind)
    given = value.value if isinstance(value, Plain) else value
    if given is None and (NoneType in members or kind is Any) and not (members == [str] and text_of(value) != "null"):
        return None
    kinds = [member for member in members if member is not NoneType]
    inner = kinds[0] if len(kinds) == 1 else Any
    try:
        return _fitted(name, value, given, inner, wrong)
    except _Misfit as misfit:
        wrong.append(f"{name}={shown(name, text_of(value))}: {misfit}")
        return None


class _Misfit(ValueError):
    """A value is not of the setting's type; the message says what is needed."""


def _fitted(name: str, value: Any, given: Any, kind: Any, wrong: list[str]) -> Any:
    origin = get_origin(kind)
    if kind is str:
        return _as_text(value)
    if kind is bool:
        if (switch := _SWITCH.get(text_of(value).lower())) is None:
            raise _Misfit("neither true nor false")
        return switch
    if kind in (int, float):
        return _as_number(value, given, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if text_of(value) not in kind.__members__:
            wrong.append(not_a_choice(name, text_of(value), kind.__members__))
            return None
        return kind[text_of(value)]
    if origin is list:
        items = _items(given)
        if items is None:
            first = "A" if isinstance(given, Mapping) else text_of(value)
            if is_dataclass(inner := get_args(kind)[0]):
                first = f"{{{fields(inner)[0].name}: {first}}}"
            raise _Misfit(f"a list is needed; write [{first}]")
        return [fit(f"{name}[{number}]", each, get_args(kind)[0], wrong) for number, each in enumerate(items)]
    if origin is dict:
        if not isinstance(given, Mapping):
            raise _Misfit("names with values are needed; write {NAME: VALUE}")
        of_keys, of_values = get_args(kind)
        return {
            fit(f"{name}: key", key, of_keys, wrong): fit(f"{name}.{text_of(key)}", each, of_values, wrong)
            for key, each in given.items()
        }
    if isinstance(kind, type) and is_dataclass(kind):
        return _group(name, given, kind, wrong)
    return _free(name, value, wrong)


def _group(name: str, given: Any, kind: Any, wrong: list[str]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    known = [item.name for item in fields(kind)]
    if not isinstance(given, Mapping):
        raise _Misfit(f"settings are needed; write {{{known[0]}: VALUE}}, with any of {', '.join(known)}")
    made = {}
    for key, each in given.items():
        if text_of(key) in hints:
            made[text_of(key)] = fit(f"{name}.{text_of(key)}", each, hints[text_of(key)], wrong)
        else:
            hint = did_you_mean(text_of(key), known) or ";"
            wrong.append(f"{name}.{text_of(key)}: no such setting{hint} there are {', '.join(known)}")
    return made


def _as_text(value: Any) -> str:
    """Return a setting of text as it was written. Python's floats have lost their text: 1.10 is 1.1."""
    given = _scalar_of(value)
    if isinstance(given, Plain):
        return given.text
    if isinstance(given, str | PurePath) or (isinstance(given, int) and not isinstance(given, bool)):
        return str(given)
    if callable(given):
        return _import_path(given)
    raise _Misfit("a text is needed; put it in quotes")


def _as_number(value: Any, given: Any, kind: Any) -> int | float:
    number = _scalar_of(given)
    try:
        if isinstance(number, str):
            number = float(number) if kind is float or not number.strip().lstrip("+-").isdigit() else int(number)
        if isinstance(number, bool) or not isinstance(number, int | float) or (kind is int and int(number) != number):
            raise ValueError
        return int(number) if kind is int else float(number)
    except (ValueError, OverflowError):
        needed = "a whole number is needed" if kind is int else "a number is needed"
        raise _Misfit(f"{_ONE}; {needed}" if "," in text_of(value) else needed) from None


def _free(name: str, value: Any, wrong: list[str]) -> Any:
    """Return a value of a free-form mapping as plain Python: texts, numbers, booleans, None, lists and mappings."""
    if isinstance(value, Plain):
        if value.text.lower() in _UNCLEAR:
            meant = "true" if value.value else "false"
            raise _Misfit(f'it may mean {meant} or be a text; write {meant}, or "{value.text}" with its quotes')
        return value.value
    value = _scalar_of(value)
    if isinstance(value, Mapping):
        return {_key(key): fit(f"{name}.{text_of(key)}", each, Any, wrong) for key, each in value.items()}
    if (items := _items(value)) is not None:
        return [fit(f"{name}[{number}]", each, Any, wrong) for number, each in enumerate(items)]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str | int | float | NoneType):
        return value
    what = f"the function or class {value.__name__}" if hasattr(value, "__name__") else f"an object ({value!r:.60})"
    raise _Misfit(f"{what} cannot be sent to other processes; give texts, numbers, lists and mappings")


def place(tree: dict[Any, Any], parts: Sequence[str], value: Any) -> None:
    """Set the value at `parts` of `tree`; a mapping is added to the one that is there, anything else replaces it."""
    first, *rest = parts
    if not rest and not isinstance(value, dict):
        tree[first] = value
        return
    if not isinstance(tree.get(first), dict):
        tree[first] = {}
    for part, each in [(rest, value)] if rest else [([key], each) for key, each in value.items()]:
        place(tree[first], part, each)


def changed(name: str, before: T, given: Mapping[str, Any]) -> T:
    """Return the group of settings `before`, called `name`, with the values `given`.

    Raises:
        ConfigError: a setting is unknown, or a value of the wrong type.
    """
    wrong: list[str] = []
    fitted, tree = fit(name, given, type(before), wrong), {"made": msgspec.to_builtins(before)}
    if wrong:
        raise ConfigError("\n".join(wrong))
    place(tree, ["made"], fitted)
    return convert(tree["made"], type(before))


def plain(value: Any) -> Any:
    """Return Python's `value` of a setting, which `fit` accepted, as data that another process can read."""
    value = _scalar_of(value)
    if isinstance(value, Mapping):
        return {_scalar_of(key): plain(each) for key, each in value.items()}
    if (items := _items(value)) is not None:
        return [plain(each) for each in items]
    if isinstance(value, str | int | float | NoneType):
        return value
    return _import_path(value) if callable(value) else str(value)


def _key(key: Any) -> Any:
    return key.value if isinstance(key, Plain) else _scalar_of(key)


def _scalar_of(value: Any) -> Any:
    """Return Python's number or text for a scalar of numpy or torch, or a member of an enum."""
    if isinstance(value, Enum):
        return value.value
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def _items(value: Any) -> list[Any] | None:
    """Return the items of a sequence; None for any other value."""
    if isinstance(value, Plain | str | bytes):
        return None
    if callable(to_list := getattr(value, "tolist", None)):  # an array
        value = to_list()
    return list(value) if isinstance(value, Sequence) else None


def _import_path(given: Any) -> str:
    """Return the import path of a function or class, for the run's processes."""
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", None)
    if not name or "<" in name or module is None:
        raise _Misfit("the run's processes cannot import it; define it in a file and write FILE.py:NAME")
    if module == "__main__":
        import __main__

        file = getattr(__main__, "__file__", None)
        if file is None:
            raise _Misfit(f"the run's processes cannot import from a notebook; move it to a file, write FILE.py:{name}")
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def members_of(kind: Any) -> list[Any]:
    """Return the types of a union, or `kind` alone."""
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def text_of(value: Any) -> str:
    """Return a value as it was written."""
    if isinstance(value, Plain):
        return value.text
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(key)}: {text_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return str(_scalar_of(value)) if not callable(value) else getattr(value, "__name__", repr(value))
