"""A custom training step: copy this file, change it, and name it in `algorithm.graph`.

`build_graph` takes the GRPO step apart and adds two calls before the advantages:

    length_reward   a custom function (below): right answers get less the longer they are
    style           the scores of a second reward model, where `style_model` names its folder

The advantages then see the sum of the environment's rewards and these two. Run it with

    python -m asyncrl.launch custom_graph
    python -m asyncrl.launch custom_graph algorithm.graph_args.style_model=/path/to/reward_model

and see it with `--show-graph`. Any Hugging Face sequence classifier with one label is a reward model; to try it
without one, `python custom_graph_example.py <policy folder> <output folder>` makes an untrained one from a policy.

The launcher and the MasterWorker import this file too, and stay free of torch: import it inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import POLICY_READS, Call, Graph, kl_in_reward, proximal, reference, written

if TYPE_CHECKING:
    from asyncrl.trainer.batches.step_batch import StepBatch
    from asyncrl.trainer.functions.model_functions import CallContext, StatValues


def build_graph(
    config: ExperimentConfig,
    *,
    length_weight: float = 0.1,
    style_model: str | None = None,
    style_weight: float = 0.1,
) -> Graph:
    """GRPO with two more sources of reward.

    Args:
        length_weight: what a right answer of the greatest length loses.
        style_model: folder of the second reward model; None: there is none.
        style_weight: factor of its score.
    """
    logprobs = (*reference(config), *proximal(config))
    rewards = [
        Call(
            "length_reward",
            "actor",
            f"{__file__}:length_reward",
            reads=("rewards", "loss_mask"),
            writes=("length_rewards",),
            args={"weight": length_weight, "limit": config.rollout.sampling.max_new_tokens},
        )
    ]
    if style_model is not None:
        rewards += [
            Call("style", "style_reward", "reward", ("tokens",), ("style_scores",), args={"path": style_model}),
            Call(
                "style_reward",
                "actor",
                f"{__file__}:scaled",
                reads=("style_scores",),
                writes=("style_rewards",),
                args={"factor": style_weight},
            ),
        ]
    keys = ("rewards", "length_rewards", *(("style_rewards",) if style_model is not None else ()))
    advantage = Call(
        "advantage",
        "actor",
        "advantage",
        reads=(*keys, "loss_mask", *kl_in_reward(config)),
        writes=("advantages",),
        args={"rewards": list(keys)},
    )
    train = Call("actor_train", "actor", "actor_train", reads=(*POLICY_READS, *written(*logprobs)))
    return Graph("grpo_with_style", (*logprobs, *rewards, advantage, train))


def length_reward(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Writes [S]: minus `weight` times the answer's share of the greatest length; 0 for wrong answers."""
    from asyncrl.algorithms.arithmetic import mean_stat

    rewards_S = batch["rewards"]
    generated_S = rewards_S.new_zeros(batch.num_seqs).index_add_(0, batch.seq_ids_T, batch["loss_mask"].double())
    right_S = rewards_S > 0
    penalty_S = ctx.args["weight"] * generated_S / ctx.args["limit"] * right_S
    batch["length_rewards"] = -penalty_S
    return ctx.reduce({"reward/length_penalty": mean_stat(penalty_S, right_S)})


def scaled(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Writes [S] what it reads, times `factor`."""
    batch[ctx.writes[0]] = batch[ctx.reads[0]] * ctx.args["factor"]
    return {}


def make_untrained_reward_model(policy: str, folder: str, seed: int = 0) -> None:
    """Write a sequence classifier with one label to `folder`: the trunk of `policy` and a random head."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(folder)


if __name__ == "__main__":
    import sys

    make_untrained_reward_model(*sys.argv[1:3])
