"""Names of settings in other systems and in asyncrl, for users who know another system.

Names are those of the systems' own configurations: TRL 1.16 (`GRPOConfig`), verl 0.9 (`ppo_trainer.yaml`), siiRL
0.2, AReaL 1.0 (`cli_args.py`), slime, prime-rl. The table serves error messages about unknown settings,
and docs/coming_from.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Alias(NamedTuple):
    """One name in other systems.

    Attributes:
        theirs: the name, or its last parts: `rollout.n` also matches `actor_rollout_ref.rollout.n`.
        of: the systems that use the name.
        ours: asyncrl's setting, with a value if the alias implies one (`trainer.engine=sharded`); empty if there is no
            such setting.
        note: the difference in meaning, or what to do instead.
    """

    theirs: str
    of: str
    ours: str
    note: str = ""


_SIZE = "there a number of prompts or samples, here the number of parts into which train_batch_size is cut"
_PROMPTS = "here in prompts (groups), for any group_size"
_DYNAMIC = "here micro-batches are cut by tokens: trainer.tokens_per_micro_batch"
_LAYOUT = "layouts are written as d<N>t<N>p<N>"
_TURNS = "servers and trainer then share GPUs and take turns"
_NO_PADDING = "sequences are packed for every model that passes a check of packing at load"

ALIASES: tuple[Alias, ...] = (
    # Batch and groups
    Alias("num_generations", "TRL", "group_size"),
    Alias("rollout.n", "verl, siiRL", "group_size"),
    Alias("gconfig.n_samples", "AReaL", "group_size"),
    Alias("n_samples_per_prompt", "slime, OpenRLHF", "group_size"),
    Alias("rollouts_per_example", "prime-rl", "group_size"),
    Alias("data.train_batch_size", "verl, siiRL", "train_batch_size", _PROMPTS),
    Alias("train_dataset.batch_size", "AReaL", "train_batch_size", _PROMPTS),
    Alias("rollout_batch_size", "slime, OpenRLHF", "train_batch_size", _PROMPTS),
    Alias("global_batch_size", "slime", "trainer.ppo_minibatches", _SIZE),
    Alias("per_device_train_batch_size", "TRL", "train_batch_size", _PROMPTS),
    Alias("generation_batch_size", "TRL", "train_batch_size", _PROMPTS),
    Alias("gradient_accumulation_steps", "TRL", "", _DYNAMIC),
    Alias("ppo_mini_batch_size", "verl, siiRL", "trainer.ppo_minibatches", _SIZE),
    Alias("ppo_n_minibatches", "AReaL", "trainer.ppo_minibatches"),
    Alias("ppo_micro_batch_size", "verl, siiRL", "trainer.tokens_per_micro_batch", "in tokens"),
    Alias("ppo_micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", "in tokens"),
    Alias("log_prob_micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", "in tokens"),
    Alias("micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", "in tokens"),
    Alias("ppo_max_token_len_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch"),
    Alias("mb_spec.max_tokens_per_mb", "AReaL", "trainer.tokens_per_micro_batch"),
    Alias("max_tokens_per_gpu", "slime", "trainer.tokens_per_micro_batch"),
    Alias("use_dynamic_bsz", "verl, siiRL", "", _DYNAMIC),
    Alias("ppo_epochs", "verl, siiRL", "trainer.ppo_epochs"),
    Alias("num_iterations", "TRL", "trainer.ppo_epochs"),
    # Length of a run
    Alias("max_steps", "TRL", "total_train_steps"),
    Alias("total_training_steps", "verl, siiRL", "total_train_steps"),
    Alias("rollout_function_path", "slime", "agent.path", "a class derived from asyncrl.api.BatchAgent"),
    Alias("num_rollout", "slime", "total_train_steps"),
    Alias("trainer.total_epochs", "verl, siiRL", "total_epochs"),
    Alias("total_train_epochs", "AReaL", "total_epochs"),
    Alias("num_train_epochs", "TRL", "total_epochs"),
    Alias("output_dir", "TRL", "fileroot", "the run is in <fileroot>/<experiment_name>/<trial_name>"),
    Alias("default_local_dir", "verl, siiRL", "fileroot", "the run is in <fileroot>/<experiment_name>/<trial_name>"),
    Alias("cluster.fileroot", "AReaL", "fileroot"),
    Alias("trainer.experiment_name", "verl, siiRL", "experiment_name"),
    Alias("trainer.project_name", "verl, siiRL", "logging.wandb_project"),
    Alias("report_to", "TRL", "logging.wandb_project", "or logging.tensorboard=true"),
    Alias("trainer.logger", "verl, siiRL", "logging.wandb_project", "or logging.tensorboard=true"),
    Alias("stats_logger.wandb", "AReaL", "logging.wandb_project"),
    # Model
    Alias("actor_rollout_ref.model.path", "verl, siiRL", "model.path"),
    Alias("actor.path", "AReaL", "model.path"),
    Alias("model_name_or_path", "TRL", "model.path"),
    Alias("hf_checkpoint", "slime", "model.path"),
    Alias("model.name", "prime-rl", "model.path"),
    Alias("tokenizer_path", "AReaL, verl", "model.path", "the tokenizer is the model folder's"),
    Alias("trust_remote_code", "TRL, verl, siiRL", "", "code in model folders is not executed"),
    Alias("gradient_checkpointing", "TRL, AReaL", "trainer.gradient_checkpointing"),
    Alias("enable_gradient_checkpointing", "verl, siiRL", "trainer.gradient_checkpointing"),
    Alias("enable_activation_offload", "verl, siiRL", "trainer.activations_on=host"),
    Alias("lora_rank", "verl, siiRL, AReaL", "model.lora.rank"),
    Alias("lora_alpha", "verl, siiRL, AReaL", "model.lora.alpha"),
    Alias("target_modules", "verl, siiRL, AReaL", "model.lora.targets"),
    Alias("use_remove_padding", "verl, siiRL", "", _NO_PADDING),
    Alias("attn_impl", "AReaL", "model.attn_implementation"),
    Alias("bf16", "TRL", "model.dtype=bfloat16"),
    # Optimizer
    Alias("learning_rate", "TRL, OpenRLHF", "optimizer.lr"),
    Alias("actor.optim.lr", "verl, siiRL", "optimizer.lr"),
    Alias("actor.optimizer.lr", "AReaL", "optimizer.lr"),
    Alias("critic.optim.lr", "verl, siiRL", "algorithm.critic.optimizer.lr"),
    Alias("critic.optimizer.lr", "AReaL", "algorithm.critic.optimizer.lr"),
    Alias("optim.weight_decay", "verl, siiRL", "optimizer.weight_decay"),
    Alias("lr_warmup_steps", "verl, siiRL", "optimizer.warmup_steps", "in optimizer steps"),
    Alias("lr_warmup_steps_ratio", "verl, siiRL", "optimizer.warmup_ratio"),
    Alias("warmup_steps_proportion", "AReaL", "optimizer.warmup_ratio"),
    Alias("warmup_ratio", "TRL", "optimizer.warmup_ratio"),
    Alias("lr_scheduler_type", "TRL, verl, AReaL", "optimizer.schedule"),
    Alias("lr_decay_style", "slime", "optimizer.schedule"),
    Alias("warmup_style", "verl, siiRL", "optimizer.schedule"),
    Alias("min_lr_ratio", "verl, siiRL, AReaL", "optimizer.min_lr_share"),
    Alias("grad_clip", "verl, siiRL", "optimizer.max_grad_norm"),
    Alias("gradient_clipping", "AReaL", "optimizer.max_grad_norm"),
    Alias("clip_grad", "slime, verl", "optimizer.max_grad_norm"),
    Alias("max_grad_norm", "TRL", "optimizer.max_grad_norm"),
    Alias("adam_beta1", "TRL, slime", "optimizer.beta1"),
    Alias("adam_beta2", "TRL, slime", "optimizer.beta2"),
    # Data
    Alias("data.train_files", "verl, siiRL", "dataset.path"),
    Alias("data.val_files", "verl, siiRL", "eval.path"),
    Alias("prompt_data", "slime", "dataset.path"),
    Alias("train_dataset.path", "AReaL", "dataset.path"),
    Alias("valid_dataset.path", "AReaL", "eval.path"),
    Alias("dataset_name", "TRL", "dataset.path"),
    Alias("data.prompt_key", "verl, siiRL", "dataset.fields", "{prompt: <their column>}"),
    Alias("input_key", "slime", "dataset.fields", "{prompt: <their column>}"),
    Alias("label_key", "slime", "dataset.fields", "{answer: <their column>}"),
    Alias("max_prompt_length", "TRL, verl, siiRL, AReaL", "dataset.max_prompt_tokens"),
    Alias("data.truncation", "verl, siiRL", "dataset.overlong"),
    Alias("filter_overlong_prompts", "verl, siiRL", "dataset.overlong"),
    Alias("apply_chat_template_kwargs", "verl", "dataset.chat_template_args"),
    Alias("chat_template_kwargs", "TRL", "dataset.chat_template_args"),
    Alias("custom_chat_template", "verl", "dataset.chat_template"),
    # Sampling
    Alias("max_completion_length", "TRL", "rollout.sampling.max_new_tokens"),
    Alias("max_response_length", "verl, siiRL", "rollout.sampling.max_new_tokens"),
    Alias("response_length", "verl, siiRL", "rollout.sampling.max_new_tokens"),
    Alias("rollout_max_response_len", "slime", "rollout.sampling.max_new_tokens"),
    Alias("gconfig.max_new_tokens", "AReaL", "rollout.sampling.max_new_tokens"),
    Alias("rollout.temperature", "verl, siiRL", "rollout.sampling.temperature"),
    Alias("gconfig.temperature", "AReaL", "rollout.sampling.temperature"),
    Alias("rollout_temperature", "slime", "rollout.sampling.temperature"),
    Alias("rollout.top_p", "verl, siiRL", "rollout.sampling.top_p"),
    Alias("gconfig.top_p", "AReaL", "rollout.sampling.top_p"),
    Alias("rollout.top_k", "verl, siiRL", "rollout.sampling.top_k"),
    Alias(
        "repetition_penalty", "TRL", "", "not supported: the loss needs the probabilities that tokens were sampled from"
    ),
    Alias("val_kwargs.n", "verl, siiRL", "eval.n_samples"),
    Alias("val_kwargs.temperature", "verl, siiRL", "eval.sampling.temperature"),
    Alias("val_kwargs.top_p", "verl, siiRL", "eval.sampling.top_p"),
    Alias("num_generations_eval", "TRL", "eval.n_samples"),
    Alias("n_samples_per_eval_prompt", "slime", "eval.n_samples"),
    # Generation
    Alias("rollout.name", "verl, siiRL", "generation.backend", "sglang or embedded"),
    Alias("use_vllm", "TRL", "generation.backend", "sglang or embedded"),
    Alias("rollout.tensor_model_parallel_size", "verl, siiRL", "generation.sglang.tensor_parallel"),
    Alias("rollout_num_gpus_per_engine", "slime", "generation.sglang.tensor_parallel"),
    Alias("vllm_tensor_parallel_size", "TRL", "generation.sglang.tensor_parallel"),
    Alias("rollout.gpu_memory_utilization", "verl, siiRL", "generation.sglang.args", "{mem_fraction_static: 0.8}"),
    Alias("sglang.mem_fraction_static", "AReaL", "generation.sglang.args", "{mem_fraction_static: 0.8}"),
    Alias("sglang_mem_fraction_static", "slime", "generation.sglang.args", "{mem_fraction_static: 0.8}"),
    Alias("vllm_gpu_memory_utilization", "TRL", "generation.sglang.args", "{mem_fraction_static: 0.8}"),
    Alias("rollout.max_num_seqs", "verl, siiRL", "generation.max_running_requests"),
    Alias("sglang.max_running_requests", "AReaL", "generation.max_running_requests"),
    Alias("rollout.max_model_len", "verl, siiRL", "generation.context_length"),
    Alias("sglang.context_length", "AReaL", "generation.context_length"),
    Alias("enforce_eager", "verl, siiRL", "generation.sglang.args", "{disable_cuda_graph: true}"),
    Alias("free_cache_engine", "verl, siiRL", "generation.guests=all", _TURNS),
    Alias("colocate", "slime", "generation.guests=all", _TURNS),
    Alias("vllm_enable_sleep_mode", "TRL", "generation.guests=all", _TURNS),
    # Asynchrony
    Alias("rollout.max_head_offpolicyness", "AReaL", "max_head_offpolicyness"),
    Alias("staleness_threshold", "verl", "max_head_offpolicyness", "there a share of a batch, here in versions"),
    Alias("max_async_level", "prime-rl", "max_head_offpolicyness"),
    Alias("async_level", "prime-rl", "max_head_offpolicyness"),
    Alias("max_staleness", "TRL", "max_head_offpolicyness"),
    Alias("max_concurrent_rollouts", "AReaL", "rollout.max_concurrent", "here of each RolloutWorker, in rollouts"),
    Alias("max_concurrent", "prime-rl", "rollout.max_concurrent", "here of each RolloutWorker, in rollouts"),
    Alias("sglang_server_concurrency", "slime", "rollout.max_concurrent", "here of each RolloutWorker, in rollouts"),
    Alias(
        "partial_rollout",
        "slime, verl",
        "",
        "answers always continue across weight updates; the staleness bound holds for all their tokens",
    ),
    # Algorithm
    Alias("adv_estimator", "verl, siiRL", "algorithm.advantage.name"),
    Alias("advantage_estimator", "slime, OpenRLHF", "algorithm.advantage.name"),
    Alias("loss_type", "TRL", "algorithm.aggregation.name", "and algorithm.policy_loss.name"),
    Alias("policy_loss.loss_mode", "verl, siiRL", "algorithm.policy_loss.name"),
    Alias("importance_sampling_level", "TRL, AReaL", "algorithm.policy_loss.name=gspo", "for ratios of sequences"),
    Alias("loss_agg_mode", "verl, siiRL", "algorithm.aggregation.name"),
    Alias("clip_ratio", "verl, siiRL", "algorithm.policy_loss.params", "{clip_low: 0.2, clip_high: 0.2}"),
    Alias("clip_ratio_low", "verl, siiRL", "algorithm.policy_loss.params", "{clip_low: 0.2}"),
    Alias("clip_ratio_high", "verl, siiRL", "algorithm.policy_loss.params", "{clip_high: 0.28}"),
    Alias("epsilon", "TRL", "algorithm.policy_loss.params", "{clip_low: 0.2, clip_high: 0.2}"),
    Alias("epsilon_high", "TRL", "algorithm.policy_loss.params", "{clip_high: 0.28}"),
    Alias("eps_clip", "AReaL, slime", "algorithm.policy_loss.params", "{clip_low: 0.2, clip_high: 0.2}"),
    Alias("eps_clip_high", "slime", "algorithm.policy_loss.params", "{clip_high: 0.28}"),
    Alias("eps_clip_higher", "AReaL", "algorithm.policy_loss.params", "{clip_high: 0.28}"),
    Alias("beta", "TRL", "algorithm.kl_coef"),
    Alias("kl_coef", "OpenRLHF, slime, verl", "algorithm.kl_coef"),
    Alias("kl_ctl", "AReaL", "algorithm.kl_coef", "with algorithm.kl_in=reward"),
    Alias("kl_loss_coef", "verl, siiRL, slime", "algorithm.kl_coef", "algorithm.kl_in=loss is the default"),
    Alias("use_kl_loss", "verl, siiRL, slime", "algorithm.kl_in=loss"),
    Alias("use_kl_in_reward", "verl, siiRL", "algorithm.kl_in=reward"),
    Alias("use_opsm", "slime", "algorithm.correction.name=opsm"),
    Alias("use_unbiased_kl", "slime", "algorithm.kl.name=k3_unbiased"),
    Alias("m2_threshold", "AReaL", "algorithm.selection.params", "{threshold: 0.04, binding: false}, with name=m2po"),
    Alias("rollout_rs", "verl", "algorithm.correction.params", "{masks: ..., bounds: ...}, with name=chain"),
    Alias("kl_loss_type", "verl, siiRL, slime", "algorithm.kl.name"),
    Alias("kl_penalty", "verl, siiRL", "algorithm.kl.name"),
    Alias("kl_estimator", "AReaL", "algorithm.kl.name"),
    Alias("target_kl", "verl, siiRL", "algorithm.kl_target", "to end a step's passes early: algorithm.stop_kl"),
    Alias("kl_ctrl.horizon", "verl, siiRL", "algorithm.kl_horizon"),
    Alias("entropy_coeff", "verl, siiRL", "algorithm.entropy_coef"),
    Alias("entropy_coef", "TRL, slime", "algorithm.entropy_coef"),
    Alias("algorithm.gamma", "verl, siiRL", "algorithm.advantage.params", "{gamma: 1.0}"),
    Alias("actor.discount", "AReaL", "algorithm.advantage.params", "{gamma: 1.0}"),
    Alias("algorithm.lam", "verl, siiRL", "algorithm.advantage.params", "{lam: 1.0}"),
    Alias("gae_lambda", "AReaL", "algorithm.advantage.params", "{lam: 1.0}"),
    Alias(
        "scale_rewards",
        "TRL",
        "algorithm.advantage.name=dr_grpo",
        "for advantages without division by the standard deviation",
    ),
    Alias("norm_adv_by_std_in_grpo", "verl, siiRL", "algorithm.advantage.name=dr_grpo", "instead of false"),
    Alias("critic_warmup", "verl, siiRL", "algorithm.critic.warmup_steps"),
    Alias("critic.cliprange_value", "verl, siiRL", "algorithm.critic.value_loss.params"),
    Alias("use_decoupled_loss", "AReaL", "algorithm.policy_loss.name=decoupled_ppo", "the default"),
    Alias("recompute_logprob", "AReaL", "algorithm.prox=recompute", "the default"),
    Alias("recompute_old_log_prob", "siiRL", "algorithm.prox=recompute", "the default"),
    Alias("behav_imp_weight_cap", "AReaL", "algorithm.correction.params", "{cap: 5.0}, with the name token_mask"),
    Alias("tis_imp_ratio_cap", "siiRL, verl", "algorithm.correction.params", "{cap: 5.0}"),
    Alias("vllm_importance_sampling_cap", "TRL", "algorithm.correction.params", "{cap: 5.0}"),
    Alias("vllm_importance_sampling_clip_max", "TRL", "algorithm.correction.params", "{cap: 5.0}"),
    Alias("filter_groups.enable", "verl, siiRL", "rollout.filters", "[{name: zero_variance}]"),
    Alias("dynamic_sampling_filter_path", "slime", "rollout.filters", "[{name: zero_variance}]"),
    Alias("overlong_buffer.enable", "verl, siiRL", "rollout.shaping", "[{name: overlong}]"),
    Alias("mask_truncated_completions", "TRL", "rollout.shaping", "[{name: overlong}] lowers their reward"),
    Alias("sync_ref_model", "TRL", "algorithm.reference.mode=ema"),
    Alias("ref_model_mixup_alpha", "TRL", "algorithm.reference.ema_decay", "here the share that stays"),
    Alias("dag.custom_pipeline_fn", "siiRL", "algorithm.graph", "import path of a function that builds the graph"),
    Alias("workflow_path", "siiRL", "algorithm.graph", "import path of a function that builds the graph"),
    # Rewards, agents, tools
    Alias("custom_reward_function.path", "verl, siiRL", "reward.path", "path/to/file.py:function(data, completion)"),
    Alias("custom_reward_function.name", "verl, siiRL", "reward.path", "path/to/file.py:function(data, completion)"),
    Alias("reward_fn", "AReaL", "reward.path"),
    Alias("custom_rm_path", "slime", "reward.path"),
    Alias("rm_type", "slime", "reward.path"),
    Alias("reward_funcs", "TRL", "rewards", "[{name: a, path: ..., weight: 1.0}]"),
    Alias("reward_weights", "TRL", "rewards", "[{name: a, path: ..., weight: 1.0}]"),
    Alias("reward_model.reward_manager", "verl, siiRL", "reward.path"),
    Alias("custom_generate_function_path", "slime", "agent.path"),
    Alias("workflow", "AReaL", "agent.path"),
    Alias("agent_loop_config_path", "verl", "agent.path"),
    Alias("multi_turn.max_assistant_turns", "verl, siiRL", "rollout.chat.max_turns"),
    Alias("max_tool_calling_iterations", "TRL", "rollout.chat.max_turns"),
    Alias("multi_turn.tool_config_path", "verl, siiRL", "tools", "[{path: ..., args: {}}]"),
    Alias("tool_config_path", "verl, siiRL", "tools", "[{path: ..., args: {}}]"),
    Alias("multi_turn.format", "verl, siiRL", "rollout.chat.parser"),
    # Evaluation, checkpoints
    Alias("trainer.test_freq", "verl, siiRL", "eval.interval", "in steps"),
    Alias("eval_interval", "slime", "eval.interval"),
    Alias("eval_steps", "TRL", "eval.interval"),
    Alias("evaluator.freq_steps", "AReaL", "eval.interval"),
    Alias("trainer.save_freq", "verl, siiRL", "checkpoint.interval", "in steps"),
    Alias("save_steps", "TRL", "checkpoint.interval"),
    Alias("save_interval", "slime", "checkpoint.interval"),
    Alias("saver.freq_steps", "AReaL", "checkpoint.interval"),
    Alias("save_total_limit", "TRL", "checkpoint.keep"),
    Alias("max_actor_ckpt_to_keep", "verl, siiRL", "checkpoint.keep"),
    Alias("resume_mode", "verl, siiRL", "resume", "auto, never or restart"),
    Alias("recover.mode", "AReaL", "resume", "auto, never or restart"),
    Alias("resume_from_checkpoint", "TRL", "resume", "auto, never or restart"),
    Alias("log_completions", "TRL", "samples.every"),
    Alias("rollout_data_dir", "verl, siiRL", "samples.every", "samples are in the run's folder"),
    Alias("validation_data_dir", "verl, siiRL", "samples.eval_every", "samples are in the run's folder"),
    # Layout
    Alias("allocation_mode", "AReaL", "trainer.parallel", "and generation.servers, generation.sglang.tensor_parallel"),
    Alias("n_gpus_per_node", "verl, siiRL, AReaL", "system.hosts", "on one host: trainer.parallel, generation.servers"),
    Alias("trainer.nnodes", "verl, siiRL", "system.hosts"),
    Alias("cluster.n_nodes", "AReaL", "system.hosts"),
    Alias("actor_num_gpus_per_node", "slime", "trainer.parallel", _LAYOUT),
    Alias("rollout_num_gpus", "slime", "generation.servers", "in servers"),
    Alias("tensor_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", _LAYOUT),
    Alias("pipeline_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", _LAYOUT),
    Alias("fsdp_config.fsdp_size", "verl, siiRL", "trainer.parallel", _LAYOUT),
    Alias("fsdp_config.param_offload", "verl, siiRL", "trainer.offload"),
    Alias("fsdp_config.optimizer_offload", "verl, siiRL", "optimizer.moments_on=host"),
    Alias("ulysses_sequence_parallel_size", "verl, siiRL", "trainer.parallel", "c<N> in it, for example d2c2"),
    Alias("expert_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", _LAYOUT),
    Alias("strategy", "verl, siiRL", "trainer.engine", "flat or sharded"),
)


RENAMED = {
    "checkpoint.keep_last_step": "checkpoint.in_memory",
    "manager.canary_tolerance": "manager.logprob_check_tolerance",
    "system.heartbeat_s": "system.lease_s",
    "system.name_resolve_patience_s": "system.name_resolve_timeout_s",
    "system.shared": "system.shared_filesystem",
    "system.stop_patience_s": "system.stop_timeout_s",
}
"""Current names of renamed settings, by their names in earlier versions."""


def elsewhere(name: str) -> Alias | None:
    """Return the alias that `name` equals or ends with, after a dot. If several match, return the one with the most
    parts.
    """
    fitting = [alias for alias in ALIASES if name == alias.theirs or name.endswith(f".{alias.theirs}")]
    return max(fitting, key=lambda alias: alias.theirs.count("."), default=None)


def answer(alias: Alias, value: str = "") -> str:
    """Return the part of an error message that explains an unknown setting, which was set to `value`."""
    here = f"here it is {alias.ours!r}" if alias.ours else "here there is no such setting"
    if alias.theirs == "allocation_mode" and (settings := allocation(value)):
        here = f"here {value} is {settings}"
    elif alias.note:
        here += f": {alias.note}"
    return f"a name of {alias.of}; {here}"


_ALLOCATION = re.compile(r"(?:sglang|vllm)[.:](\w+)\+(?:(?:fsdp|megatron|archon)[.:])?(\w+)")
_AXES = re.compile(r"([dtmpc])(\d+)")


def allocation(value: str) -> str | None:
    """Translate AReaL's `allocation_mode`, such as `sglang.d4m1p1+d2p1m1`, to our settings; None if it has no
    equivalent.

    The servers' layout comes first, in which `d` is their number; the trainer's layout comes after the `+`.
    """
    if (found := _ALLOCATION.fullmatch(value)) is None:
        return None
    parts = [_AXES.findall(part) for part in found.groups()]
    if ["".join(axis + size for axis, size in part) for part in parts] != list(found.groups()):
        return None
    servers, trainer = ({axis.replace("m", "t"): int(size) for axis, size in part} for part in parts)
    if servers.get("p", 1) > 1 or servers.get("c", 1) > 1:
        return None
    layout = "".join(f"{axis}{trainer[axis]}" for axis in "dctp" if trainer.get(axis, 1) > 1) or "d1"
    tensor = f" generation.sglang.tensor_parallel={servers['t']}" if servers.get("t", 1) > 1 else ""
    return f"trainer.parallel={layout} generation.servers={servers.get('d', 1)}{tensor}"
