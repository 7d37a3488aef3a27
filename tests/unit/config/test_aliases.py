"""Settings of other systems are answered with ours, from one table, which also makes docs/coming_from.md."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.aliases import allocation, elsewhere, table, under_current_names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, settings
from asyncrl.config.setting import ConfigError
from asyncrl.trainer.parallel.placement import Layout

ALIASES, RENAMED = table().aliases, table().renamed
PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
BEGIN, END = "<!-- made from asyncrl/config/aliases.yaml by tests/unit/config/test_aliases.py -->\n", "<!-- end -->\n"
OURS = {path for path, _, _ in settings(ExperimentConfig)}

# Of the systems' own examples (verl's run_*.sh, TRL's and AReaL's GRPO examples, slime's run scripts, siiRL's guide).
IN_EXAMPLES = {
    "verl": (
        "algorithm.adv_estimator data.train_files data.val_files data.train_batch_size data.max_prompt_length "
        "data.max_response_length data.filter_overlong_prompts data.truncation actor_rollout_ref.model.path "
        "actor_rollout_ref.actor.optim.lr actor_rollout_ref.model.use_remove_padding "
        "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
        "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type "
        "actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.model.enable_gradient_checkpointing "
        "actor_rollout_ref.model.enable_activation_offload "
        "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.name "
        "actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.gpu_memory_utilization "
        "actor_rollout_ref.rollout.n algorithm.use_kl_in_reward trainer.critic_warmup trainer.logger "
        "trainer.project_name trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes trainer.save_freq "
        "trainer.test_freq trainer.total_epochs"
    ),
    "TRL": (
        "learning_rate num_generations max_completion_length max_prompt_length per_device_train_batch_size "
        "gradient_accumulation_steps num_train_epochs max_steps beta num_iterations epsilon epsilon_high loss_type "
        "scale_rewards use_vllm vllm_gpu_memory_utilization log_completions bf16 gradient_checkpointing save_steps "
        "report_to warmup_ratio lr_scheduler_type max_grad_norm reward_weights mask_truncated_completions output_dir"
    ),
    "AReaL": (
        "allocation_mode gconfig.n_samples gconfig.max_new_tokens gconfig.temperature actor.path actor.optimizer.lr "
        "actor.mb_spec.max_tokens_per_mb actor.gradient_checkpointing actor.eps_clip actor.kl_ctl "
        "actor.ppo_n_minibatches actor.recompute_logprob actor.use_decoupled_loss rollout.max_concurrent_rollouts "
        "rollout.max_head_offpolicyness sglang.mem_fraction_static sglang.context_length train_dataset.path "
        "train_dataset.batch_size saver.freq_steps recover.mode cluster.fileroot cluster.n_nodes total_train_epochs"
    ),
    "slime": (
        "hf_checkpoint prompt_data input_key label_key rollout_batch_size n_samples_per_prompt num_rollout "
        "rollout_max_response_len rollout_temperature global_batch_size rm_type advantage_estimator use_kl_loss "
        "kl_loss_coef kl_loss_type entropy_coef eps_clip eps_clip_high max_tokens_per_gpu eval_interval "
        "rollout_num_gpus_per_engine sglang_mem_fraction_static tensor_model_parallel_size colocate"
    ),
    "siiRL": (
        "algorithm.adv_estimator dag.custom_pipeline_fn dag.workflow_path data.train_files data.max_prompt_length "
        "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.rollout.n trainer.total_epochs "
        "actor_rollout_ref.actor.recompute_old_log_prob custom_reward_function.path"
    ),
}


SYSTEMS = (("TRL",), ("verl", "siiRL"), ("AReaL",), ("slime",), ("OpenRLHF",), ("prime-rl",))
"""Sections of the page: systems whose names are mostly the same share one."""


def tables_of_page() -> str:
    return "\n".join(f"## {' and '.join(systems)}\n\n{_table(systems)}" for systems in SYSTEMS)


def _table(systems: tuple[str, ...]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for alias in sorted(ALIASES, key=lambda alias: alias.theirs.lower()):
        owners = [system for system in systems if system in alias.of.split(", ")]
        if owners:
            only = "" if len(owners) == len(systems) else f" ({owners[0]})"
            rows.setdefault((alias.ours, alias.note), []).append(f"`{alias.theirs}`{only}")
    lines = [
        f"| {', '.join(theirs)} | {f'`{_shown(ours)}`' if ours else '–'} | {_plain(_shown(note))} |"
        for (ours, note), theirs in rows.items()
    ]
    return "\n".join(["| there | here | note |", "|---|---|---|", *lines]) + "\n"


def _shown(text: str) -> str:
    return text.replace("{value}", "VALUE").replace("{rest}", "1 - VALUE")


def _plain(note: str) -> str:
    return note.replace("<", "&lt;").replace("|", "\\|")


def test_every_system_of_the_table_has_its_section() -> None:
    assert {system for alias in ALIASES for system in alias.of.split(", ")} == {s for part in SYSTEMS for s in part}


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    before, found, rest = text.partition(BEGIN)
    made = before + BEGIN + tables_of_page() + END + rest.partition(END)[2]
    if made != text:
        PAGE.write_text(made)
    assert found
    assert made == text, "docs/coming_from.md was not made from the table; it has been made anew: look at it, commit it"


ANSWERS = sorted({each for alias in ALIASES for each in (alias.ours, *alias.values.values()) if each})


@pytest.mark.parametrize("ours", ANSWERS)
def test_every_answer_names_a_setting_that_there_is_and_a_value_that_it_takes(ours: str) -> None:
    """Also with the user's value in its place."""
    setting, has_value, _ = ours.partition("=")
    assert setting in OURS or setting.rpartition(".")[0] in OURS
    if has_value:
        load_experiment("async_ppo", [ours.replace("{value}", "0.25").replace("{rest}", "0.75").replace("TOKENS", "9")])


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_by_its_earlier_name_is_answered_with_its_name_now(old: str) -> None:
    assert old not in OURS
    assert RENAMED[old] in OURS
    with pytest.raises(ConfigError, match=f"it was renamed to '{RENAMED[old]}'"):
        load_experiment("async_ppo", [f"{old}=1"])


@pytest.mark.parametrize("old", RENAMED)
def test_settings_of_a_run_of_an_earlier_version_are_read_by_their_names_now(old: str) -> None:
    *groups, last = old.split(".")
    written: dict[str, Any] = {last: "its value", "other": 1}
    for group in reversed(groups):
        written = {group: written}
    before = copy.deepcopy(written)
    found: Any = under_current_names(written)
    assert written == before
    for name in RENAMED[old].split("."):
        found = found[name]
    assert found == "its value"
    assert under_current_names({groups[0]: "no group"}) == {groups[0]: "no group"}


@pytest.mark.parametrize(
    ("system", "name"),
    [(system, name) for system, names in IN_EXAMPLES.items() for name in names.split() if name not in OURS],
)
def test_what_the_systems_own_examples_set_is_answered_from_the_table(system: str, name: str) -> None:
    """`system` only names the case: a name that several systems have is answered once."""
    aliases = elsewhere(name)
    assert aliases
    with pytest.raises(ConfigError) as caught:
        load_experiment("async_ppo", [f"{name}=8"])
    for alias in aliases:
        assert alias.ours.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("rollout.n=8", "here it is 'group_size=8'"),
        ("algorithm.adv_estimator=grpo", "here it is 'algorithm.advantage.name=grpo'"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "here it is 'algorithm.advantage.name=reinforce_pp'"),
        ("algorithm.adv_estimator=of_mine", "here it is 'algorithm.advantage.name' "),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is 'optimizer.lr=1e-6'"),
        ("trainer.optim.lr=1e-6", "here it is 'optimizer.lr=1e-6'"),
        ("critic.optim.lr=1e-5", "here it is 'algorithm.critic.optimizer.lr=1e-5'"),
        ("clip_ratio=0.1", "'algorithm.policy_loss.params={clip_low: 0.1, clip_high: 0.1}'"),
        ("actor.eps_clip=0.4", "'algorithm.policy_loss.params={clip_low: 0.4, clip_high: 0.4}'"),
        ("clip_ratio_high=0.3", "'algorithm.policy_loss.params.clip_high=0.3'"),
        ("rollout.gpu_memory_utilization=0.6", "'generation.sglang.args.mem_fraction_static=0.6'"),
        ("ref_model_mixup_alpha=0.6", "'algorithm.reference.ema_decay=0.4'"),
        ("algorithm.gamma=0.9", "'algorithm.advantage.params.gamma=0.9'"),
        ("tis_imp_ratio_cap=2", "'algorithm.correction.params.cap=2'"),
        ("input_key=question", "'dataset.fields.prompt=question'"),
        ("kl_loss_type=low_var_kl", "'algorithm.kl.name=k3'"),
        ("loss_agg_mode=seq-mean-token-sum", "'algorithm.aggregation.name=seq_mean_token_sum'"),
        ("rollout.name=vllm", "'generation.backend=sglang'"),
        ("data.truncation=error", "'dataset.overlong=refuse'"),
        (
            "global_batch_size=256",
            "there samples of a minibatch, here their number: train_batch_size * group_size / 256",
        ),
        ("ppo_mini_batch_size=64", "there prompts of a minibatch, here their number: train_batch_size / 64"),
        ("orchestrator.batch_size=128", "there in samples, here in prompts: 128 / group_size"),
        ("per_device_train_batch_size=4", "4 * devices * accumulation steps / group_size"),
        ("ppo_micro_batch_size_per_gpu=2", "there in sequences, here in tokens: 2 * the tokens of a sequence"),
        ("tensor_model_parallel_size=2", "'trainer.parallel': t2 in it"),
        ("resume_mode=disable", "'resume=never'"),
        ("scale_rewards=False", "'algorithm.advantage.name=dr_grpo'"),
        ("recompute_logprob=false", "'algorithm.prox=behave'"),
        ('trainer.logger=["console","wandb"]', "logging.wandb_project=NAME sends metrics"),
        ("dag.custom_pipeline_fn=x", "here it is 'algorithm.graph'"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "here their number: train_batch_size"),
        ("max_concurrent_rollouts=64", "here of each RolloutWorker"),
        ("allocation_mode=sglang.d4m2p1+d2p1m2", "is trainer.parallel=d2t2 generation.servers=4 "),
    ],
)
def test_a_name_of_another_system_is_answered_with_ours_and_the_difference(written: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment("async_ppo", [written])
    assert message in str(caught.value)


SWITCHES = [alias.theirs for alias in ALIASES if "=" in alias.ours and "{" not in alias.ours.replace("[{", "")]


@pytest.mark.parametrize("value", ["False", "false", "0", "null"])
@pytest.mark.parametrize("name", ["use_kl_in_reward", "enforce_eager", "colocate", "optimizer_offload", "use_opsm"])
def test_what_is_switched_off_there_is_left_out_here(name: str, value: str) -> None:
    assert any(theirs.endswith(name) for theirs in SWITCHES)
    name = next(theirs for theirs in SWITCHES if theirs.endswith(name))
    with pytest.raises(ConfigError, match=f"; with {value} leave it out here") as caught:
        load_experiment("async_ppo", [f"{name}={value}"])
    assert "here it is" not in str(caught.value)
    with pytest.raises(ConfigError, match="here it is"):
        load_experiment("async_ppo", [f"{name}=true"])


def test_a_name_that_means_different_things_elsewhere_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"a name of verl; here .*; or a name of slime; here "):
        load_experiment("async_ppo", ["kl_coef=0.1"])


def test_all_names_of_a_foreign_file_are_answered_at_once_with_their_values(tmp_path: Path) -> None:
    text = "actor: {path: M, optimizer: {lr: 1.7e-5}, eps_clip: 0.4, kl_ctl: 0.0}\ngconfig: {n_samples: 4}"
    (tmp_path / "theirs.yaml").write_text(f"defaults: [async_ppo, _self_]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_experiment("theirs", [], tmp_path)
    reported = str(caught.value).splitlines()
    assert len(reported) == 5
    for part in ("model.path=M", "optimizer.lr=1.7e-5", "clip_high: 0.4", "algorithm.kl_coef=0.0", "group_size=4"):
        assert len([line for line in reported if part in line and "in theirs.yaml" in line]) == 1, part


@pytest.mark.parametrize("name", ["reward_model.enable_thing", "trainer.val_only", "data.image_key", "frobnicate"])
def test_a_name_that_is_near_none_of_ours_is_not_answered_with_a_guess(name: str) -> None:
    with pytest.raises(ConfigError, match="--help lists all of them") as caught:
        load_experiment("async_ppo", [f"{name}=1"])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("sglang.d4m1p1+d2p1m1", "trainer.parallel=d2 generation.servers=4"),
        ("sglang:d2t4+fsdp:d8", "trainer.parallel=d8 generation.servers=2 generation.sglang.tensor_parallel=4"),
        ("sglang:d2+fsdp:d2c2", "trainer.parallel=d2c2 generation.servers=2"),
        ("sglang:d2+megatron:d2t2p2", "trainer.parallel=d2t2p2 generation.servers=2"),
        ("sglang:d1p2+d1", None),
        ("d8", None),
    ],
)
def test_an_allocation_mode_is_translated(mode: str, ours: str | None) -> None:
    assert allocation(mode) == ours


def test_the_m_of_a_layout_is_t() -> None:
    assert Layout.parse("d2p2m1") == Layout.parse("d2p2t1")
    assert str(Layout.parse("d2m4")) == "d2t4"
    with pytest.raises(ValueError, match="'t' is there twice"):
        Layout.parse("m2t2")


def test_of_several_names_that_end_so_the_longest_is_meant() -> None:
    assert [alias.theirs for alias in elsewhere("actor_rollout_ref.actor.optim.lr")] == ["actor.optim.lr"]
