"""Settings of the user's code: the group `my`, checked by the dataclass that `my_class` names.

Other settings use them: `reward.args={scale: "${my.scale}"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError


def own_class(path: str) -> type:
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


def own_settings(path: str, schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
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
