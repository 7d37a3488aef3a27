"""Parameters that weight decay acts on, in the models that people train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.engines.flat import FlatLoader
from asyncrl.trainer.engines.optimizer import decay_groups, embedding_names
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerConfig

ARCHITECTURES = [
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "cohere",
    "olmo2",
    "gpt_oss",
    "smollm3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "bloom",
    "stablelm",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_and_biases_never_decay_and_every_matrix_does(architecture: str) -> None:
    """Against the classes of the modules, which the rule does not look at."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](num_hidden_layers=1, pad_token_id=None))
    kinds = {
        f"{path}.{own}" if path else own: type(part).__name__
        for path, part in model.named_modules()
        for own, _ in part.named_parameters(recurse=False)
    }
    groups = decay_groups(model.named_parameters())
    undecayed = {name for name, _ in groups.undecayed}
    names = [name for name, _ in model.named_parameters()]
    assert [*groups.decayed, *groups.undecayed] == sorted(
        model.named_parameters(), key=lambda named: named[0] in undecayed
    )
    for name in names:
        is_norm, is_bias = "Norm" in kinds[name], "bias" in name.rsplit(".", 1)[-1]
        per_channel = model.get_parameter(name).ndim == 1  # attention sinks
        assert (name in undecayed) == (is_norm or is_bias or per_channel), name

    without_embeddings = decay_groups(model.named_parameters(), embedding_names(model))
    assert {kinds[name] for name, _ in without_embeddings.decayed}.isdisjoint({"Embedding"})
    embeddings = {name for name, _ in without_embeddings.undecayed} - undecayed
    assert embeddings
    assert all("Embedding" in kinds[name] for name in embeddings)


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_a_loaded_model_decays_as_configured(decay_embeddings: bool, config: ExperimentConfig, llama_dir: Path) -> None:
    loader = FlatLoader(config, RankPosition(), torch.device("cpu"))
    optimizer = OptimizerConfig(lr=0.5, weight_decay=0.5, decay_embeddings=decay_embeddings)
    policy = loader.policy(str(llama_dir), config.model.dtype, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}
    policy.step(0.5)  # of gradients that are all 0, so that only the decay acts
    for name, parameter in policy.module.named_parameters():
        decays = "norm" not in name and (decay_embeddings or "embed_tokens" not in name)
        torch.testing.assert_close(parameter.detach(), before[name] * (0.75 if decays else 1.0))


def test_groups_that_are_empty_are_left_out() -> None:
    only_matrix = nn.Linear(2, 3, bias=False)
    ((named, decay),) = decay_groups(only_matrix.named_parameters()).with_decay(0.1)
    assert ([name for name, _ in named], decay) == (["weight"], 0.1)
    only_norm = nn.LayerNorm(3)
    ((named, decay),) = decay_groups(only_norm.named_parameters()).with_decay(0.1)
    assert ([name for name, _ in named], decay) == (["weight", "bias"], 0.0)
