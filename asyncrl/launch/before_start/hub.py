"""Models and data sets by their name on the Hugging Face hub, `Qwen/Qwen2.5-0.5B-Instruct`: each becomes a folder.

A folder of that name comes first, then the hub's cache on this machine (`HF_HOME`), then the hub itself. The cache's
content is used as it is, so a resumed run has the same model as before, and a run can start without a network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets.rows.readers import JSONL, PARQUET

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_TAKEN = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*", "onnx/*"]
"""Weights in other formats than safetensors, which are often in the same folder."""


@dataclass(frozen=True)
class _Named:
    """A setting that may hold a hub name."""

    setting: str
    kind: str
    value: str
    put: Callable[[str], None]


def resolve_hub_names(config: Config) -> None:
    """Replace each hub name in `config` by its folder, downloading it first if necessary, and `~` by the home folder.

    Raises:
        ConfigError: with every name that is neither a folder, nor in the cache, nor available from the hub.
    """
    messages = []
    for named in _settings(config):
        if named.value.startswith("~"):
            named.put(str(Path(named.value).expanduser()))
        if not is_hub_name(named.value):
            continue
        try:
            named.put(str(_folder(named)))
        except ConfigError as error:
            messages.append(str(error))
    if messages:
        raise ConfigError("\n".join(messages))


def is_hub_name(value: str) -> bool:
    """True if `value` has the form `owner/name` and is neither a file nor below a folder of this machine."""
    path = Path(value).expanduser()
    return bool(_NAME.fullmatch(value)) and not value.endswith((JSONL, PARQUET)) and not path.parent.exists()


def _settings(config: Config) -> Iterator[_Named]:
    def named(setting: str, kind: str, owner: object) -> Iterator[_Named]:
        value = getattr(owner, "path", None)
        if isinstance(value, str):
            yield _Named(setting, kind, value, lambda folder: setattr(owner, "path", folder))

    yield from named("model.path", "model", config.model)
    yield from named("dataset.path", "dataset", config.dataset)
    yield from named("eval.path", "dataset", config.eval)
    if isinstance(config, ExperimentConfig):
        yield from named("algorithm.critic.path", "model", config.algorithm.critic)
        yield from named("algorithm.reference.path", "model", config.algorithm.reference)
        for number, teacher in enumerate(config.algorithm.teachers):
            yield from named(f"algorithm.teachers[{number}].path", "model", teacher)
        for number, each in enumerate(config.eval.sets):
            yield from named(f"eval.sets[{number}].path", "dataset", each)
        for number, source in enumerate(config.dataset.sources):
            yield from named(f"dataset.sources[{number}].path", "dataset", source)


def _folder(named: _Named) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    given, instead = f"{named.setting}={named.value!r}", f"give the folder of a downloaded {named.kind}"

    def snapshot(local_files_only: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            named.value, repo_type=named.kind, ignore_patterns=_NOT_TAKEN, local_files_only=local_files_only
        )
        return Path(found)

    try:
        try:
            return snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            return snapshot(local_files_only=False)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{given}: the hub refuses it ({reason}); check the name and HF_TOKEN, or {instead}"
        ) from None
    except (OSError, ValueError) as error:  # no network, a full disk, a name that the hub does not have
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else 'no reason'}"
        raise ConfigError(
            f"{given}: no such folder, not in the hub's cache here, and the hub cannot be reached ({reason}); "
            f"{instead}, or start where the hub can be reached"
        ) from None
