"""Names of settings in other systems and in asyncrl, for users who know another system.

Names are those of the systems' own configurations: TRL 1.16 (`GRPOConfig`), verl 0.9 (`ppo_trainer.yaml`), siiRL
0.2, AReaL 1.0 (`cli_args.py`), slime, prime-rl. The table serves error messages about unknown settings,
and docs/coming_from.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Alias(NamedTuple):
    """One name in other systems.

    Attributes:
        theirs: the name, or its last parts: `rollout.n` also matches `actor_rollout_ref.rollout.n`.
        of: the systems that use the name.
        ours: asyncrl's setting; empty if there is none. With a value (`trainer.engine=sharded`) it is what the name
            means when it is switched on. `{value}` stands for the user's value, `{rest}` for one minus it.
        note: the difference in meaning, or what to do instead, with the same places.
        values: asyncrl's settings by values of the name; empty text: leave it out. Others are not translated.
    """

    theirs: str
    of: str
    ours: str
    note: str = ""
    values: Mapping[str, str] = {}


_PARTS = "there prompts of a minibatch, here their number: train_batch_size / {value}"
_PARTS_OF_SAMPLES = "there samples of a minibatch, here their number: train_batch_size * group_size / {value}"
_SAMPLES = "there in samples, here in prompts: {value} / group_size"
_OF_A_DEVICE = "there samples of a device, here prompts of a step: {value} * devices * accumulation steps / group_size"
_SEQUENCES = "there in sequences, here in tokens: {value} * the tokens of a sequence"
_TRACKERS = (
    "logging.wandb_project=NAME sends metrics to Weights & Biases, logging.tensorboard=true writes event files, "
    "the terminal always shows a line a step"
)
_OF_SERVERS = "mem_fraction_static is SGLang's share for weights and KV cache"
_PROMPTS = "here in prompts (groups), for any group_size"
_DYNAMIC = "here micro-batches are cut by tokens: trainer.tokens_per_micro_batch"
_LAYOUT = "layouts are written as d<N>t<N>p<N>"
_RUN_FOLDER = "the run is in <fileroot>/<experiment_name>/<trial_name>"
_TURNS = "servers and trainer then share GPUs and take turns"
_NO_PADDING = "sequences are packed for every model that passes a check of packing at load"

_GAE = "with algorithm.advantage.name=gae"
_CLIP = "algorithm.policy_loss.params={clip_low: {value}, clip_high: {value}}"
_MEMORY = "generation.sglang.args.mem_fraction_static={value}"
_OVERLONG_SHAPING = "rollout.shaping=[{name: overlong, params: {max_length: TOKENS}}]"


def _choices(setting: str, **values: str) -> dict[str, str]:
    return {theirs.replace("__", "-"): ours and f"{setting}={ours}" for theirs, ours in values.items()}


_NEVER = {"": ""}
"""No value means the same here."""
_ONE = {"1": ""}
_SCHEDULES = _choices(
    "optimizer.schedule",
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
    cosine_with_min_lr="cosine",
)
_OVERLONG = _choices("dataset.overlong", error="refuse", left="left", right="right", middle="middle")
_BACKENDS = _choices(
    "generation.backend", vllm="sglang", sglang="sglang", hf="embedded", true="sglang", false="embedded"
)
_BF16 = _choices("model.dtype", true="bfloat16", false="float32")
_DECOUPLED = _choices("algorithm.policy_loss.name", true="", false="ppo_clip")
_RECOMPUTED = _choices("algorithm.prox", true="", false="behave")
_ENGINES = _choices("trainer.engine", fsdp="sharded", fsdp2="sharded", megatron="sharded")
_RESUME = _choices(
    "resume",
    auto="auto",
    on="auto",
    true="auto",
    fault="auto",
    disable="never",
    disabled="never",
    off="never",
    false="",
)
_ADVANTAGES = _choices(
    "algorithm.advantage.name",
    gae="gae",
    ppo="gae",
    grpo="grpo",
    group_norm="grpo",
    dr_grpo="dr_grpo",
    gspo="grpo",
    gpg="gpg",
    opo="opo",
    remax="remax",
    rloo="rloo",
    reinforce="reinforce_pp",
    reinforce_plus_plus="reinforce_pp",
    reinforce_plus_plus_baseline="reinforce_pp_baseline",
    reinforce_baseline="reinforce_pp_baseline",
)
_LOSSES = _choices("algorithm.policy_loss.name", vanilla="ppo_clip", gspo="gspo", cispo="cispo", sapo="sapo", gpg="gpg")
_AGGREGATIONS = _choices(
    "algorithm.aggregation.name",
    token__mean="token_mean",
    seq__mean__token__mean="seq_mean_token_mean",
    seq__mean__token__sum="seq_mean_token_sum",
)
_LOSS_TYPES = _choices(
    "algorithm.aggregation.name", grpo="seq_mean_token_mean", bnpo="token_mean", dapo="token_mean", dr_grpo="constant"
)
_KL = _choices("algorithm.kl.name", kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3", full="full")
_SCALED = _choices("algorithm.advantage.name", true="", group="", false="dr_grpo", none="dr_grpo")

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
    Alias("global_batch_size", "slime", "trainer.ppo_minibatches", _PARTS_OF_SAMPLES),
    Alias("per_device_train_batch_size", "TRL", "train_batch_size", _OF_A_DEVICE),
    Alias("generation_batch_size", "TRL", "train_batch_size", _SAMPLES),
    Alias("batch_size", "prime-rl", "train_batch_size", _SAMPLES),
    Alias("gradient_accumulation_steps", "TRL", "", _DYNAMIC),
    Alias("ppo_mini_batch_size", "verl, siiRL", "trainer.ppo_minibatches", _PARTS),
    Alias("ppo_n_minibatches", "AReaL", "trainer.ppo_minibatches"),
    Alias("ppo_micro_batch_size", "verl, siiRL", "trainer.tokens_per_micro_batch", _SEQUENCES),
    Alias("ppo_micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", _SEQUENCES),
    Alias("log_prob_micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", _SEQUENCES),
    Alias("micro_batch_size_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch", _SEQUENCES),
    Alias("ppo_max_token_len_per_gpu", "verl, siiRL", "trainer.tokens_per_micro_batch"),
    Alias("mb_spec.max_tokens_per_mb", "AReaL", "trainer.tokens_per_micro_batch"),
    Alias("max_tokens_per_gpu", "slime", "trainer.tokens_per_micro_batch"),
    Alias("use_dynamic_bsz", "verl, siiRL", "", _DYNAMIC),
    Alias("ppo_epochs", "verl, siiRL", "trainer.ppo_epochs"),
    Alias("num_iterations", "TRL", "trainer.ppo_epochs"),
    Alias("micro_train_batch_size", "OpenRLHF", "trainer.tokens_per_micro_batch", _SEQUENCES),
    Alias("log_prob_max_token_len_per_gpu", "verl", "trainer.tokens_per_micro_batch"),
    Alias("consumer_batch_size", "AReaL", "train_batch_size", _PROMPTS),
    Alias("max_epochs", "OpenRLHF", "trainer.ppo_epochs"),
    # Length of a run
    Alias("num_episodes", "OpenRLHF", "total_epochs"),
    Alias("wandb.project", "prime-rl", "logging.wandb_project"),
    Alias("wandb.name", "prime-rl", "experiment_name", "with trial_name it is the name in Weights & Biases"),
    Alias("ckpt_path", "OpenRLHF", "fileroot", _RUN_FOLDER),
    Alias("save_path", "OpenRLHF", "fileroot", _RUN_FOLDER),
    Alias("save", "slime", "fileroot", _RUN_FOLDER),
    Alias("load", "slime", "", "a trial continues by itself: see resume"),
    Alias("load_checkpoint", "OpenRLHF", "resume", "auto, never or restart", _RESUME),
    Alias("max_steps", "TRL, prime-rl", "total_train_steps"),
    Alias("total_training_steps", "verl, siiRL", "total_train_steps"),
    Alias("rollout_function_path", "slime", "agent.path", "a class derived from asyncrl.api.BatchAgent", _NEVER),
    Alias("num_rollout", "slime", "total_train_steps"),
    Alias("trainer.total_epochs", "verl, siiRL", "total_epochs"),
    Alias("total_train_epochs", "AReaL", "total_epochs"),
    Alias("num_train_epochs", "TRL", "total_epochs"),
    Alias("output_dir", "TRL", "fileroot", _RUN_FOLDER),
    Alias("default_local_dir", "verl, siiRL", "fileroot", _RUN_FOLDER),
    Alias("cluster.fileroot", "AReaL", "fileroot"),
    Alias("trainer.experiment_name", "verl, siiRL", "experiment_name"),
    Alias("trainer.project_name", "verl, siiRL", "logging.wandb_project"),
    Alias("report_to", "TRL", "", _TRACKERS),
    Alias("trainer.logger", "verl, siiRL", "", _TRACKERS),
    Alias("stats_logger.wandb.mode", "AReaL", "", _TRACKERS),
    Alias("use_wandb", "slime, OpenRLHF", "", f"{_TRACKERS}; a key is in WANDB_API_KEY"),
    # Model
    Alias("actor_rollout_ref.model.path", "verl, siiRL", "model.path"),
    Alias("actor.path", "AReaL", "model.path"),
    Alias("model_name_or_path", "TRL", "model.path"),
    Alias("hf_checkpoint", "slime", "model.path"),
    Alias("model.name", "prime-rl", "model.path"),
    Alias("tokenizer_path", "AReaL, verl", "", "the tokenizer is that of the folder model.path"),
    Alias("pretrain", "OpenRLHF", "model.path"),
    Alias("trust_remote_code", "TRL, verl, siiRL", "", "code in model folders is not executed"),
    Alias("gradient_checkpointing", "TRL, AReaL, OpenRLHF", "trainer.gradient_checkpointing"),
    Alias("enable_gradient_checkpointing", "verl, siiRL", "trainer.gradient_checkpointing"),
    Alias("enable_activation_offload", "verl, siiRL", "trainer.activations_on=host"),
    Alias("lora_rank", "verl, siiRL, AReaL", "model.lora.rank"),
    Alias("lora_alpha", "verl, siiRL, AReaL", "model.lora.alpha"),
    Alias("target_modules", "verl, siiRL, AReaL", "model.lora.targets"),
    Alias("use_remove_padding", "verl, siiRL", "", _NO_PADDING),
    Alias("attn_impl", "AReaL", "model.attn_implementation"),
    Alias("bf16", "TRL, OpenRLHF", "model.dtype", values=_BF16),
    Alias("actor.dtype", "AReaL", "model.dtype"),
    Alias("recompute_granularity", "slime", "trainer.gradient_checkpointing=true"),
    Alias("trainer.model.ac", "prime-rl", "trainer.gradient_checkpointing"),
    Alias("ref_load", "slime", "algorithm.reference.path", "a Hugging Face folder", _NEVER),
    Alias("cast_lm_head_to_fp32", "TRL", "model.float32_head", "here of the servers too"),
    # Optimizer
    Alias("learning_rate", "TRL, OpenRLHF", "optimizer.lr"),
    Alias("actor.optim.lr", "verl, siiRL", "optimizer.lr"),
    Alias("optim.lr", "prime-rl", "optimizer.lr"),
    Alias("actor_learning_rate", "OpenRLHF", "optimizer.lr"),
    Alias("critic_learning_rate", "OpenRLHF", "algorithm.critic.optimizer.lr"),
    Alias("actor.optimizer.lr", "AReaL", "optimizer.lr"),
    Alias("critic.optim.lr", "verl, siiRL", "algorithm.critic.optimizer.lr"),
    Alias("critic.optimizer.lr", "AReaL", "algorithm.critic.optimizer.lr"),
    Alias("optim.weight_decay", "verl, siiRL", "optimizer.weight_decay"),
    Alias("lr_warmup_steps", "verl, siiRL", "optimizer.warmup_steps", "in optimizer steps"),
    Alias("lr_warmup_steps_ratio", "verl, siiRL", "optimizer.warmup_ratio"),
    Alias("warmup_steps_proportion", "AReaL", "optimizer.warmup_ratio"),
    Alias("warmup_ratio", "TRL", "optimizer.warmup_ratio"),
    Alias("lr_scheduler_type", "TRL, verl, AReaL", "optimizer.schedule", values=_SCHEDULES),
    Alias("lr_decay_style", "slime", "optimizer.schedule", values=_SCHEDULES),
    Alias("warmup_style", "verl, siiRL", "optimizer.schedule", values=_SCHEDULES),
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
    Alias("prompt_data", "slime, OpenRLHF", "dataset.path"),
    Alias("train_dataset.path", "AReaL", "dataset.path"),
    Alias("valid_dataset.path", "AReaL", "eval.path"),
    Alias("dataset_name", "TRL", "dataset.path"),
    Alias("data.prompt_key", "verl, siiRL", "dataset.fields.prompt={value}"),
    Alias("input_key", "slime, OpenRLHF", "dataset.fields.prompt={value}"),
    Alias("label_key", "slime, OpenRLHF", "dataset.fields.answer={value}"),
    Alias("max_prompt_length", "TRL, verl, siiRL, AReaL", "dataset.max_prompt_tokens"),
    Alias("data.truncation", "verl, siiRL", "dataset.overlong", values=_OVERLONG),
    Alias("filter_overlong_prompts", "verl, siiRL", "dataset.overlong=filter"),
    Alias("apply_chat_template_kwargs", "verl", "dataset.chat_template_args"),
    Alias("chat_template_kwargs", "TRL", "dataset.chat_template_args"),
    Alias("custom_chat_template", "verl", "dataset.chat_template"),
    Alias("prompt_max_len", "OpenRLHF", "dataset.max_prompt_tokens"),
    Alias("train_dataset.max_length", "AReaL", "dataset.max_prompt_tokens"),
    # Sampling
    Alias("generate_max_len", "OpenRLHF", "rollout.sampling.max_new_tokens"),
    Alias("sampling.max_completion_tokens", "prime-rl", "rollout.sampling.max_new_tokens"),
    Alias("min_new_tokens", "AReaL", "", "answers have no least length"),
    Alias("gconfig.greedy", "AReaL", "", "samples of a group must differ; evaluations are greedy (eval.sampling)"),
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
    Alias("eval_prompt_data", "slime", "eval.path"),
    Alias("eval_max_response_len", "slime", "eval.sampling.max_new_tokens"),
    Alias("eval_top_p", "slime", "eval.sampling.top_p"),
    # Generation
    Alias("vllm_num_engines", "OpenRLHF", "generation.servers"),
    Alias("inference.parallel.tp", "prime-rl", "generation.sglang.tensor_parallel"),
    Alias("enable_chunked_prefill", "verl", "generation.sglang.args", "{chunked_prefill_size: TOKENS}"),
    Alias("colocate_all_models", "OpenRLHF", "generation.guests=all", _TURNS),
    Alias("rollout.name", "verl, siiRL", "generation.backend", "sglang or embedded", _BACKENDS),
    Alias("use_vllm", "TRL", "generation.backend", "sglang or embedded", _BACKENDS),
    Alias("rollout.tensor_model_parallel_size", "verl, siiRL", "generation.sglang.tensor_parallel"),
    Alias("rollout_num_gpus_per_engine", "slime", "generation.sglang.tensor_parallel"),
    Alias("vllm_tensor_parallel_size", "TRL, OpenRLHF", "generation.sglang.tensor_parallel"),
    Alias("rollout.gpu_memory_utilization", "verl, siiRL", _MEMORY, _OF_SERVERS),
    Alias("sglang.mem_fraction_static", "AReaL", _MEMORY, _OF_SERVERS),
    Alias("sglang_mem_fraction_static", "slime", _MEMORY, _OF_SERVERS),
    Alias("vllm_gpu_memory_utilization", "TRL", _MEMORY, _OF_SERVERS),
    Alias("rollout.max_num_seqs", "verl, siiRL", "generation.max_running_requests"),
    Alias("sglang.max_running_requests", "AReaL", "generation.max_running_requests"),
    Alias("rollout.max_model_len", "verl, siiRL", "generation.context_length"),
    Alias("sglang.context_length", "AReaL", "generation.context_length"),
    Alias("enforce_eager", "verl, siiRL", "generation.sglang.args.disable_cuda_graph=true"),
    Alias("free_cache_engine", "verl, siiRL", "generation.guests=all", _TURNS),
    Alias("colocate", "slime", "generation.guests=all", _TURNS),
    Alias("vllm_enable_sleep_mode", "TRL", "generation.guests=all", _TURNS),
    # Asynchrony
    Alias("rollout.max_head_offpolicyness", "AReaL", "max_head_offpolicyness"),
    Alias(
        "staleness_threshold", "verl", "max_head_offpolicyness", "there a share of a batch, here in versions", _NEVER
    ),
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
    Alias("max_off_policy_steps", "prime-rl", "max_head_offpolicyness"),
    Alias("async_train", "OpenRLHF", "", "training is asynchronous unless max_head_offpolicyness=0"),
    Alias("weight_update_mode", "AReaL", "manager.weight_transport", "disk, tensor or distributed", _NEVER),
    # Algorithm
    Alias("gamma", "OpenRLHF", "algorithm.advantage.params.gamma={value}", _GAE),
    Alias("lambd", "OpenRLHF", "algorithm.advantage.params.lam={value}", _GAE),
    Alias("reward_scaling", "AReaL", "", "scale in your reward function"),
    Alias("reward_bias", "AReaL", "", "add it in your reward function"),
    Alias("remote_rm_url", "OpenRLHF", "reward.path", "a function of (data, completion)", _NEVER),
    Alias("adv_estimator", "verl, siiRL", "algorithm.advantage.name", values=_ADVANTAGES),
    Alias("advantage_estimator", "slime, OpenRLHF", "algorithm.advantage.name", values=_ADVANTAGES),
    Alias("loss_type", "TRL", "algorithm.aggregation.name", "and algorithm.policy_loss.name", _LOSS_TYPES),
    Alias("policy_loss.loss_mode", "verl, siiRL", "algorithm.policy_loss.name", values=_LOSSES),
    Alias(
        "importance_sampling_level",
        "TRL, AReaL",
        "algorithm.policy_loss.name=gspo",
        "for ratios of sequences",
        {"token": "", "sequence": "algorithm.policy_loss.name=gspo"},
    ),
    Alias("loss_agg_mode", "verl, siiRL", "algorithm.aggregation.name", values=_AGGREGATIONS),
    Alias("clip_ratio", "verl, siiRL", _CLIP),
    Alias("clip_ratio_low", "verl, siiRL", "algorithm.policy_loss.params.clip_low={value}"),
    Alias("clip_ratio_high", "verl, siiRL", "algorithm.policy_loss.params.clip_high={value}"),
    Alias("epsilon", "TRL", _CLIP),
    Alias("epsilon_high", "TRL", "algorithm.policy_loss.params.clip_high={value}"),
    Alias("eps_clip", "AReaL, slime", _CLIP),
    Alias("eps_clip_low_high", "OpenRLHF", "algorithm.policy_loss.params", "{clip_low: LOW, clip_high: HIGH}"),
    Alias("eps_clip_high", "slime", "algorithm.policy_loss.params.clip_high={value}"),
    Alias("eps_clip_higher", "AReaL", "algorithm.policy_loss.params.clip_high={value}"),
    Alias("beta", "TRL", "algorithm.kl_coef"),
    Alias("kl_coef", "verl", "algorithm.kl_coef", "with algorithm.kl_in=reward"),
    Alias("kl_coef", "slime", "algorithm.kl_coef", "with algorithm.kl_in=reward; kl_loss_coef with kl_in=loss"),
    Alias("init_kl_coef", "OpenRLHF", "algorithm.kl_coef", "with algorithm.kl_in=reward, or loss for use_kl_loss"),
    Alias("kl_ctl", "AReaL", "algorithm.kl_coef", "with algorithm.kl_in=reward"),
    Alias("kl_loss_coef", "verl, siiRL, slime", "algorithm.kl_coef", "algorithm.kl_in=loss is the default"),
    Alias("use_kl_loss", "verl, siiRL, slime, OpenRLHF", "algorithm.kl_in=loss"),
    Alias("use_kl_in_reward", "verl, siiRL", "algorithm.kl_in=reward"),
    Alias("use_opsm", "slime", "algorithm.correction.name=opsm"),
    Alias("use_unbiased_kl", "slime", "algorithm.kl.name=k3_unbiased"),
    Alias(
        "m2_threshold",
        "AReaL",
        "algorithm.selection.params.threshold={value}",
        "with algorithm.selection.name=m2po, and params.binding=false",
    ),
    Alias("rollout_rs", "verl", "algorithm.correction.params", "of algorithm.correction.name=chain"),
    Alias("kl_loss_type", "verl, siiRL, slime", "algorithm.kl.name", values=_KL),
    Alias("kl_penalty", "verl, siiRL", "algorithm.kl.name", values=_KL),
    Alias("kl_estimator", "AReaL, OpenRLHF", "algorithm.kl.name", values=_KL),
    Alias("target_kl", "verl, siiRL", "algorithm.kl_target", "to end a step's passes early: algorithm.stop_kl"),
    Alias("kl_ctrl.horizon", "verl, siiRL", "algorithm.kl_horizon"),
    Alias("entropy_coeff", "verl, siiRL", "algorithm.entropy_coef"),
    Alias("entropy_coef", "TRL, slime", "algorithm.entropy_coef"),
    Alias("algorithm.gamma", "verl, siiRL", "algorithm.advantage.params.gamma={value}", _GAE),
    Alias("actor.discount", "AReaL", "algorithm.advantage.params.gamma={value}", _GAE),
    Alias("algorithm.lam", "verl, siiRL", "algorithm.advantage.params.lam={value}", _GAE),
    Alias("gae_lambda", "AReaL", "algorithm.advantage.params.lam={value}", _GAE),
    Alias("scale_rewards", "TRL", "algorithm.advantage.name", "without division by the deviation: dr_grpo", _SCALED),
    Alias(
        "norm_adv_by_std_in_grpo",
        "verl, siiRL",
        "algorithm.advantage.name",
        "without division by the deviation: dr_grpo",
        _SCALED,
    ),
    Alias("critic_warmup", "verl, siiRL", "algorithm.critic.warmup_steps"),
    Alias("critic.cliprange_value", "verl, siiRL", "algorithm.critic.value_loss.params", "clip"),
    Alias("use_decoupled_loss", "AReaL", "algorithm.policy_loss.name", "decoupled_ppo is the default", _DECOUPLED),
    Alias("recompute_logprob", "AReaL", "algorithm.prox", "recompute is the default", _RECOMPUTED),
    Alias("recompute_old_log_prob", "siiRL", "algorithm.prox", "recompute is the default", _RECOMPUTED),
    Alias(
        "behav_imp_weight_cap",
        "AReaL",
        "algorithm.correction.params.cap={value}",
        "with algorithm.correction.name=token_mask",
    ),
    Alias("tis_imp_ratio_cap", "siiRL, verl", "algorithm.correction.params.cap={value}"),
    Alias("vllm_importance_sampling_cap", "TRL", "algorithm.correction.params.cap={value}"),
    Alias("vllm_importance_sampling_clip_max", "TRL", "algorithm.correction.params.cap={value}"),
    Alias("filter_groups.enable", "verl, siiRL", "rollout.filters=[{name: zero_variance}]"),
    Alias("dynamic_sampling_filter_path", "slime", "rollout.filters", "[{name: zero_variance}], or your function"),
    Alias("overlong_buffer.enable", "verl, siiRL", _OVERLONG_SHAPING),
    Alias("mask_truncated_completions", "TRL", _OVERLONG_SHAPING, "which lowers their reward"),
    Alias("sync_ref_model", "TRL", "algorithm.reference.mode=ema"),
    Alias("ref_model_mixup_alpha", "TRL", "algorithm.reference.ema_decay={rest}", "here the share that stays"),
    Alias("dag.custom_pipeline_fn", "siiRL", "algorithm.graph", "import path of a function that builds it", _NEVER),
    Alias("workflow_path", "siiRL", "algorithm.graph", "import path of a function that builds it", _NEVER),
    # Rewards, agents, tools
    Alias(
        "custom_reward_function.path",
        "verl, siiRL",
        "reward.path",
        "{value}:FUNCTION of (data, completion)",
        _NEVER,
    ),
    Alias("custom_reward_function.name", "verl, siiRL", "reward.path", "path/to/FILE.py:{value}", _NEVER),
    Alias("reward_fn", "AReaL", "reward.path", "a function that takes (data, completion)", _NEVER),
    Alias("custom_rm_path", "slime", "reward.path", "a function that takes (data, completion)", _NEVER),
    Alias("rm_type", "slime", "reward.path", "a function of yours or of docs/rewards.md", _NEVER),
    Alias("reward_funcs", "TRL", "rewards", "[{name: a, path: ..., weight: 1.0}]"),
    Alias("reward_weights", "TRL", "rewards", "[{name: a, path: ..., weight: 1.0}]"),
    Alias(
        "reward_model.reward_manager",
        "verl, siiRL",
        "reward.path",
        "a function of yours or of asyncrl.plugins.rewards",
        _NEVER,
    ),
    Alias("custom_generate_function_path", "slime", "agent.path", "an agent of asyncrl (docs/agents.md)", _NEVER),
    Alias("workflow", "AReaL", "agent.path", "an agent of asyncrl (docs/agents.md)", _NEVER),
    Alias("agent_loop_config_path", "verl", "agent.path", "an agent of asyncrl (docs/agents.md)", _NEVER),
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
    Alias("save_steps", "TRL, OpenRLHF", "checkpoint.interval"),
    Alias("save_interval", "slime", "checkpoint.interval"),
    Alias("saver.freq_steps", "AReaL", "checkpoint.interval"),
    Alias("save_total_limit", "TRL", "checkpoint.keep"),
    Alias("max_actor_ckpt_to_keep", "verl, siiRL", "checkpoint.keep"),
    Alias("resume_mode", "verl, siiRL", "resume", "auto, never or restart", _RESUME),
    Alias("recover.mode", "AReaL", "resume", "auto, never or restart", _RESUME),
    Alias("resume_from_checkpoint", "TRL", "resume", "auto, never or restart", _RESUME),
    Alias("log_completions", "TRL", "samples.every=1"),
    Alias("rollout_data_dir", "verl, siiRL", "samples.every", "N keeps every N-th, in the run's folder"),
    Alias("validation_data_dir", "verl, siiRL", "samples.eval_every", "N keeps every N-th, in the run's folder"),
    Alias("max_ckpt_num", "OpenRLHF", "checkpoint.keep"),
    Alias("ckpt.interval", "prime-rl", "checkpoint.interval"),
    Alias("ckpt.keep_last", "prime-rl", "checkpoint.keep"),
    # Layout
    Alias("zero_stage", "OpenRLHF", "trainer.engine=sharded"),
    Alias("allocation_mode", "AReaL", "trainer.parallel", "and generation.servers, generation.sglang.tensor_parallel"),
    Alias("n_gpus_per_node", "verl, siiRL, AReaL", "system.hosts", "on one host: trainer.parallel, generation.servers"),
    Alias("trainer.nnodes", "verl, siiRL", "system.hosts"),
    Alias("cluster.n_nodes", "AReaL", "system.hosts"),
    Alias("actor_num_gpus_per_node", "slime", "trainer.parallel", "of {value} GPUs; " + _LAYOUT),
    Alias("rollout_num_gpus", "slime", "generation.servers", "there GPUs, here servers: {value} / GPUs of a server"),
    Alias("tensor_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", "t{value} in it; " + _LAYOUT, _ONE),
    Alias("pipeline_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", "p{value} in it; " + _LAYOUT, _ONE),
    Alias("context_parallel_size", "slime", "trainer.parallel", "c{value} in it; " + _LAYOUT, _ONE),
    Alias("fsdp_config.fsdp_size", "verl, siiRL", "trainer.parallel", _LAYOUT),
    Alias("fsdp_config.param_offload", "verl, siiRL", "trainer.offload"),
    Alias("fsdp_config.optimizer_offload", "verl, siiRL", "optimizer.moments_on=host"),
    Alias("ulysses_sequence_parallel_size", "verl, siiRL", "trainer.parallel", "c{value} in it; " + _LAYOUT, _ONE),
    Alias("expert_model_parallel_size", "verl, siiRL, slime", "trainer.parallel", _LAYOUT, _ONE),
    Alias("strategy", "verl, siiRL", "trainer.engine=sharded", values=_ENGINES),
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


def elsewhere(name: str) -> list[Alias]:
    """Return the aliases that `name` equals or ends with, after a dot; of several, those with the most parts."""
    fitting = [alias for alias in ALIASES if name == alias.theirs or name.endswith(f".{alias.theirs}")]
    most = max((alias.theirs.count(".") for alias in fitting), default=0)
    return [alias for alias in fitting if alias.theirs.count(".") == most]


_OFF = ("false", "off", "no", "none", "null", "disabled", "0", "0.0", "")


def answer(alias: Alias, value: str, fits: Callable[[str, str], bool]) -> str:
    """Return the part of an error message that explains an unknown setting, which was set to `value`.

    Args:
        fits: returns True if a setting of asyncrl's takes a value.
    """
    setting, fixed, _ = alias.ours.partition("=")
    chosen = alias.values.get(value.lower()) if value else None
    is_template = "{value}" in fixed or "{rest}" in fixed
    if alias.theirs == "allocation_mode" and (settings := allocation(value)):
        here = f"here {value} is {settings}"
    elif chosen == "" or (fixed and not is_template and chosen is None and value.lower() in _OFF):
        here = f"with {value} leave it out here"
    elif chosen:
        here = f"here it is {chosen!r}"
    elif not setting:
        here = "here there is no such setting"
    elif fixed:
        here = f"here it is {_filled(alias.ours, value)!r}"
    else:
        copied = value and not alias.values and "{value}" not in alias.note and fits(setting, value)
        here = f"here it is {f'{setting}={value}' if copied else setting!r}"
    note = (
        ""
        if here.startswith(("with ", f"here {value} is")) or chosen or ("{value}" in alias.ours and not value)
        else alias.note
    )
    return f"a name of {alias.of}; {here}" + (f": {_filled(note, value)}" if note else "")


def _filled(text: str, value: str) -> str:
    """Return `text` with the user's value, or a stand-in if there is none."""
    try:
        rest = f"{1 - float(value):.10g}"
    except ValueError:
        rest = "1 - VALUE"
    return text.replace("{value}", value or "VALUE").replace("{rest}", rest)


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
