"""Settings of the user's code: the group `my`, checked by the dataclass that `my_class` names.

Other settings use them: `reward.args={scale: "${my.scale}"}`.
"""

from __future__ import annotations

from dataclasses import is_dataclass

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.config.suggestions import did_you_mean


def complete_own_settings(config: DictConfig) -> None:
    """Check `config.my` against the dataclass, and add the defaults of settings that are not given.

    Raises:
        ConfigError: no class is given, it is not a dataclass, or a value is unknown, missing or of another type.
    """
    path, given = config.my_class, OmegaConf.to_container(config.my, resolve=False)
    if not path:
        if given:
            raise ConfigError(f"my={given}: its fields are not defined; name your dataclass: my_class=FILE.py:NAME")
        return
    try:
        schema = load_plugin(path)
        if not is_dataclass(schema) or not isinstance(schema, type):
            raise ConfigError(f"my_class={path!r}: {schema!r:.80} is not a dataclass; add @dataclass")
        known = OmegaConf.structured(schema)
        checked = OmegaConf.merge(known, config.my)
    except PluginError as error:
        raise ConfigError(f"my_class={error}") from error
    except (ConfigKeyError, ConfigAttributeError) as error:
        name, names = str(error.full_key), ", ".join(map(str, known))
        raise ConfigError(
            f"my.{name}: {path!r} has no such field{did_you_mean(name, list(map(str, known))) or '.'} It has: {names}"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"my.{error.full_key}: {str(error).splitlines()[0]} (my_class={path!r})") from error
    if missing := sorted(OmegaConf.missing_keys(checked)):
        raise ConfigError("\n".join(f"my.{name}: it has no default in {path!r}; set it" for name in missing))
    config.my = OmegaConf.to_container(checked, resolve=False, enum_to_str=True)
