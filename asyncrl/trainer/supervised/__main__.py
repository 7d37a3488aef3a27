"""The process of a supervised experiment: `python -m asyncrl.trainer.supervised.__main__ CONFIG.yaml OUT_DIR`.

Progress goes to standard output as JSON lines, `{"step", "total", "loss", "eta_s"}`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from asyncrl.datasets import DemonstrationDataset, load_dataset
from asyncrl.datasets.tokenizers import CharTokenizer, load_tokenizer
from asyncrl.trainer.supervised.loop import SFTPhase, SFTProgress, SFTSettings, make_base_model
from asyncrl.trainer.supervised.settings import SFTConfig


def main(config_file: Path, out_dir: Path) -> None:
    """Make the model that the config describes."""
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SFTConfig), OmegaConf.load(config_file)))
    assert isinstance(config, SFTConfig), type(config)
    make_base_model(
        out_dir,
        tokenizer=load_tokenizer(config.model.path) if config.model.path else CharTokenizer(),
        phases=phases_of(config),
        architecture=config.model.architecture or None,
        initial_model=config.model.path,
        settings=SFTSettings(
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            lr=config.lr,
            adamw_lr=config.adamw_lr,
            min_lr_share=config.min_lr_share,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
        ),
        seed=config.seed,
        threads=config.threads,
        progress=_report,
    )


def phases_of(config: SFTConfig) -> list[SFTPhase]:
    """The phases that `config` describes, with their datasets."""
    phases = []
    for phase in config.phases:
        dataset = load_dataset(config.dataset.path, {**config.dataset.args, **phase.args}, "train", config.seed)
        phases.append(SFTPhase(cast(DemonstrationDataset, dataset), phase.steps))
    return phases


def _report(progress: SFTProgress) -> None:
    print(json.dumps(asdict(progress)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
