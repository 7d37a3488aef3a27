"""The training step of `reward_model.yaml`: advantages from a reward model's scores alone."""

from __future__ import annotations

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import POLICY_READS, Call, Graph, kl_in_reward, proximal, reference, written


def build_graph(config: ExperimentConfig, *, path: str) -> Graph:
    """GRPO on the scores of the model in `path` in place of the environment's rewards.

    Args:
        path: folder of the reward model, a Hugging Face sequence classifier with one label.
    """
    logprobs = (*reference(config), *proximal(config))
    reads = ("scores", "loss_mask", *kl_in_reward(config))
    calls = (
        *logprobs,
        Call("judge", "judge", "reward", reads=("tokens",), writes=("scores",), args={"path": path}),
        Call("advantage", "actor", "advantage", reads, writes=("advantages",), args={"rewards": "scores"}),
        Call("actor_train", "actor", "actor_train", reads=(*POLICY_READS, *written(*logprobs))),
    )
    return Graph("reward_model", calls)
