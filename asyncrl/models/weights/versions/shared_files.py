"""Files beside the weights of every version that never change: configuration, tokenizer, chat template.

They are written and synced once in the life of a process, and each version holds hard links to them:

    <root>/<role>/.shared/tokenizer.json        ◀── same file ──▶   <root>/<role>/v7/tokenizer.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PretrainedConfig

from asyncrl.models.model_config import CONFIG_FILE as MODEL_CONFIG
from asyncrl.models.model_config import for_all_versions
from asyncrl.models.weights import atomic_dir
from asyncrl.models.weights.model_files.adapters import CONFIG_FILE
from asyncrl.models.weights.versions.manifest import FileEntry, file_entry

_STORE = ".shared"


class SharedFiles:
    """A model's configuration and copies of the files `assets`, by their names in a version.

    Args:
        config: the model's configuration. For adapters it is the content of peft's, and the other files are the base's.

    Attributes:
        adapters: True if the weights are adapters.
    """

    def __init__(self, config: PretrainedConfig | bytes, assets: Mapping[str, Path] | None = None) -> None:
        self.adapters = isinstance(config, bytes)
        plain = b"" if isinstance(config, bytes) else config.to_json_string(use_diff=True).encode()
        self._config = config if isinstance(config, bytes) else for_all_versions(MODEL_CONFIG, plain)
        self._assets = dict(assets or {})
        self._entries: dict[str, FileEntry] = {}

    def link_into(self, directory: Path) -> dict[str, FileEntry]:
        """Put the files into `directory`, a version's; returns their sizes and checksums.

        Raises:
            OSError: the files cannot be written.
        """
        store = directory.parent / _STORE
        if not (self._entries and store.is_dir()):
            self._entries = self._write(store)
        for name in self._entries:
            atomic_dir.link_file(store / name, directory / name)
        return dict(self._entries)

    def _write(self, store: Path) -> dict[str, FileEntry]:
        directory = atomic_dir.begin(store)
        config_file = CONFIG_FILE if self.adapters else MODEL_CONFIG
        atomic_dir.write_file(directory / config_file, self._config)
        for name, asset in self._assets.items():
            atomic_dir.write_file(directory / name, for_all_versions(name, asset.read_bytes()))
        atomic_dir.commit(store)
        return {name: file_entry(store / name) for name in sorted({config_file, *self._assets})}
