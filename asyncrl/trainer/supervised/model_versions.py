"""Versions of the model that supervised training makes, and the result as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from asyncrl.comm.names import ACTOR
from asyncrl.models.ranks import Ranks
from asyncrl.models.weights import atomic_dir
from asyncrl.models.weights.model_files.adapters import CONFIG_FILE as ADAPTERS_FILE
from asyncrl.models.weights.model_files.stored import MergedModel, StoredModel, from_folder
from asyncrl.models.weights.versions.manifest import verify
from asyncrl.models.weights.versions.publishing import publish, tokenizer_assets, write_model
from asyncrl.models.weights.versions.shared_files import SharedFiles
from asyncrl.trainer.engines.base import TrainingEngine
from asyncrl.trainer.model.lora import adapter_config
from asyncrl.trainer.settings import LoraConfig


class ModelVersions:
    """Writes the model of `engine`. All ranks call its methods together.

    Args:
        model: folder of the model that training began with.
        root: folder of the versions.
        lora: adapters, if a version holds only adapters.
    """

    def __init__(self, engine: TrainingEngine, model: Path, root: Path, lora: LoraConfig | None, ranks: Ranks) -> None:
        self._engine, self._model, self._root, self._lora, self._ranks = engine, model, root, lora, ranks

    def publish(self, version: int) -> Path:
        """Write the model, or its adapters, as `version`; return the folder."""
        shared = SharedFiles(self._engine.model_config, tokenizer_assets(self._model))
        if self._lora is not None:
            specs, model_config = self._engine.published_specs(), self._engine.model_config
            shared = SharedFiles(adapter_config(self._lora, str(self._model), specs, model_config))
        return publish(self._engine, self._root, role=ACTOR, version=version, ranks=self._ranks, shared=shared)

    def export(self, published: Path, out_dir: Path, beside: dict[str, bytes]) -> None:
        """Write a published version, adapters merged, as the Hugging Face folder `out_dir`.

        Args:
            beside: further files by name.
        """

        def write() -> None:
            if not self._ranks.leads:
                return
            stored = StoredModel(verify(published), from_folder(published))
            model = stored if self._lora is None else MergedModel(stored, (published / ADAPTERS_FILE).read_bytes())
            own = model.beside() if isinstance(model, MergedModel) else _small_files(published)
            if out_dir.exists():
                atomic_dir.remove(out_dir)
            write_model(model, out_dir, {**own, **beside}, self._ranks)

        self._ranks.together(write, f"writing {out_dir}")


def _small_files(published: Path) -> dict[str, bytes]:
    """Return configuration and tokenizer in the folder of a version."""
    files = {"config.json": published / "config.json", **tokenizer_assets(published)}
    return {name: file.read_bytes() for name, file in files.items()}
