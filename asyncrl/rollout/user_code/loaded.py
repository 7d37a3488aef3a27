"""Load the class or function of a setting `<group>.path`, and construct it with `<group>.args`."""

from __future__ import annotations

from typing import Any

from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError, PluginConfig


def loaded(group: str, plugin: PluginConfig) -> Any:
    """Return the class or function of the setting `<group>.path`."""
    try:
        found = load_plugin(plugin.path)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error
    if not callable(found):
        raise ConfigError(f"{group}.path={plugin.path!r}: it is a {type(found).__name__}; name a class or function")
    return found


def built(group: str, plugin: PluginConfig, base: type, **supplied: object) -> Any:
    """Construct the instance of `base` that `<group>.path` and `<group>.args` describe."""
    try:
        made = loaded(group, plugin)(**supplied, **plugin.args)
    except ConfigError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        given = f"{group}.path={plugin.path!r}, {group}.args={plugin.args}"
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if not isinstance(made, base):
        kind = type(made).__name__
        raise ConfigError(f"{group}.path={plugin.path!r} made a {kind}; it needs to be an asyncrl.api.{base.__name__}")
    return made
