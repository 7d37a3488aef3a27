# ruff: noqa: E501 - names of tests are as long as they are
"""Further cases of what the suite tries, which `ASYNCRL_EVERY_CASE=1 make test` tries as well: seven minutes on two cores.

The suite tries each guarantee with one case of each kind. What is listed here takes long, and shows for another model,
layout or back end what a case that stays shows; each list says which. A case that is called otherwise by now is tried:
a wrong name costs time and hides nothing. `tests/unit/test_further_cases.py` finds wrong names of tests.
"""

from __future__ import annotations

FURTHER_CASES: dict[str, tuple[str, ...]] = {
    "a layout of all three kinds, one of slices with adapters, and routers with replay stay": (
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen3-d1]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen3+lora4-d1]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen3+lora4-t2p2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[llama+lora4-t4]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen2+merged-p2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[mixtral-t2p2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen3_moe-d2t2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[mixtral+replay-d2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[mixtral+replay-t2]",
        "tests/unit/trainer/engines/sharded/test_layouts.py::test_any_layout_trains_as_one_process_does[qwen3-d2c2]",
    ),
    "moments, adapters and recomputed layers in host memory stay in two cases": (
        "tests/unit/trainer/engines/sharded/test_offload.py::test_idle_roles_and_moments_in_host_memory_train_as_they_do_on_the_device[d1 bf16 ema]",
        "tests/unit/trainer/engines/sharded/test_offload.py::test_idle_roles_and_moments_in_host_memory_train_as_they_do_on_the_device[d1 lora]",
        "tests/unit/trainer/engines/sharded/test_offload.py::test_idle_roles_and_moments_in_host_memory_train_as_they_do_on_the_device[p2]",
        "tests/unit/trainer/engines/sharded/test_memory_and_checkpoints.py::test_bf16_is_near_fp32[c2]",
    ),
    "one of three models that no other test has stays, and one family's rules for pictures": (
        "tests/unit/models/test_every_model.py::test_a_sample_is_trained_and_served_as_the_page_says[phimoe]",
        "tests/unit/models/test_every_model.py::test_a_sample_is_trained_and_served_as_the_page_says[moshi]",
        "tests/unit/models/test_pictures.py::test_rules_without_torch_say_what_the_processor_says[idefics3]",
        "tests/unit/models/test_pictures.py::test_rules_without_torch_say_what_the_processor_says[mistral3]",
    ),
    "the engine's answers stay against a plain forward of four models at one temperature each": (
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-qwen3]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-llama]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-mistral]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-gemma]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-gemma2]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[1.0-gemma3_text]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[0.7-qwen2]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[0.7-llama]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[0.7-gemma]",
        "tests/unit/inference/test_engine_logprobs.py::test_logprobs_equal_a_plain_forward_while_requests_join_and_leave[0.7-gemma2]",
        "tests/unit/inference/test_engine_program.py::test_recorded_decoding_follows_a_weight_update[gemma]",
        "tests/unit/inference/test_engine_program.py::test_recorded_decoding_follows_a_weight_update[qwen2]",
        "tests/unit/inference/test_prefix_rows.py::test_interrupted_groups_get_the_tokens_that_they_get_undisturbed[abort]",
    ),
    "one of each kind of state (`FEW`) stays, as does every kind of model with turns": (
        "tests/unit/inference/test_engine_states.py::test_samples_of_all_lengths_that_join_and_leave_have_the_logprobs_of_the_model_alone[mamba2]",
        "tests/unit/inference/test_engine_states.py::test_samples_of_all_lengths_that_join_and_leave_have_the_logprobs_of_the_model_alone[bamba]",
        "tests/unit/inference/test_engine_states.py::test_samples_of_all_lengths_that_join_and_leave_have_the_logprobs_of_the_model_alone[granitemoehybrid]",
        "tests/unit/inference/test_engine_states.py::test_a_group_is_prefilled_once_and_parts_with_copies_of_the_state[mamba2]",
        "tests/unit/inference/test_engine_states.py::test_a_group_is_prefilled_once_and_parts_with_copies_of_the_state[bamba]",
        "tests/unit/inference/test_engine_states.py::test_a_group_is_prefilled_once_and_parts_with_copies_of_the_state[granitemoehybrid]",
        "tests/unit/inference/test_engine_turns.py::test_any_schedule_of_conversations_gives_the_tokens_that_it_gives_where_nothing_is_kept[qwen2-wide]",
        "tests/unit/inference/test_engine_turns.py::test_prompts_in_parts_give_the_tokens_that_they_give_whole[qwen2-tiny]",
    ),
    "exports stay in both types, and of a model with pictures and adapters": (
        "tests/unit/launch/test_export.py::test_a_model_with_pictures_is_exported_with_its_tower_and_what_reads_pictures_in[gemma3-0]",
        "tests/unit/launch/test_export.py::test_a_model_with_pictures_is_exported_with_its_tower_and_what_reads_pictures_in[qwen2_vl-0]",
        "tests/unit/launch/test_export.py::test_adapters_are_merged_into_their_base[published-float32]",
        "tests/unit/launch/test_export.py::test_adapters_are_merged_into_their_base[checkpoint-float32]",
        "tests/unit/launch/test_export.py::test_what_was_published_merged_is_exported_and_its_adapters_come_from_the_checkpoint[float32]",
    ),
    "of commands whose reader has left, one stays": (
        "tests/unit/launch/test_readers.py::test_a_reader_that_left_is_no_error[arguments0]",
        "tests/unit/launch/test_readers.py::test_a_reader_that_left_is_no_error[arguments1]",
        "tests/unit/launch/test_readers.py::test_a_reader_that_left_is_no_error[arguments2]",
    ),
    "pages stay on a server and in a report, light and dark": (
        "tests/integration/test_dashboard_browser.py::test_every_tab_shows_what_the_files_say_and_parses_none_of_it[live-server-light]",
        "tests/integration/test_dashboard_browser.py::test_every_tab_shows_what_the_files_say_and_parses_none_of_it[crashed-server-light]",
        "tests/integration/test_dashboard_browser.py::test_every_tab_shows_what_the_files_say_and_parses_none_of_it[live-report-light]",
    ),
    "of losses, those by clipped ratios of tokens, of sequences, and by truncated ones stay": (
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[cispo]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[cpgd]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[dppo]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[dppo_kl]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[gmpo]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[gpg]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[ppo_clip]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[reinforce]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[sapo]",
        "tests/unit/trainer/test_trained_policies.py::test_a_policy_with_learning_rate_0_is_a_frozen_one[vespo]",
    ),
    "each feature of these whole runs stays in another": (
        "tests/e2e/test_oracle.py::test_losses_are_those_of_the_reference_loop[d1-1-5]",
        "tests/e2e/test_several_policies.py::test_both_policies_take_the_steps_of_the_reference_loop_over_deaths_of_their_processes[on the same ranks]",
        "tests/e2e/test_whole_system.py::test_a_mixture_of_experts_is_served_as_it_is_trained[flat-d1-False]",
        "tests/e2e/test_own_backend.py::test_a_run_trains_on_a_server_that_knows_only_the_documented_endpoints[in_place]",
        "tests/e2e/test_tools.py::test_the_examples_call_their_tool_and_train[tool_function]",
    ),
    "updates of a real server from memory stay in the GPU benchmark's row, and one run with them": (
        "tests/e2e/test_sglang_run.py::test_a_run_takes_its_weights_from_the_trainers_memory[distributed-1-in_place-0]",
    ),
    "of the pretended device one case of each way through the code stays": (
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[pictures, frozen tower]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[checkpointing]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[packed]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[averaged reference, two passes]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[critic of normalised returns]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[capped logits]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[few allowed tokens]",
        "tests/device/test_pretended_device.py::test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches[linear attention]",
        "tests/device/test_pretended_device.py::test_a_server_on_the_device_scores_a_versions_probe_as_the_trainer_and_a_version_waits_once_for_each_tensor[pictures]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[pictures that look both ways]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[bf16]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[greedy]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[capped logits]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[latent attention]",
        "tests/device/test_pretended_engine.py::test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told[states in modules]",
        "tests/device/test_pretended_engine.py::test_an_update_in_the_middle_of_samples_leads_to_the_cpus_tokens[in_place-pictures]",
        "tests/device/test_pretended_engine.py::test_an_update_in_the_middle_of_samples_leads_to_the_cpus_tokens[in_place-scan]",
        "tests/device/test_pretended_engine.py::test_an_update_in_the_middle_of_samples_leads_to_the_cpus_tokens[retract-experts, recorded]",
    ),
    "pi stays at one of its APIs, and openai-agents at another": (
        "tests/programs/test_programs.py::test_a_program_does_its_task_and_each_token_has_loss_once[pi-responses]",
        "tests/programs/test_programs.py::test_a_program_does_its_task_and_each_token_has_loss_once[pi-messages]",
        "tests/programs/test_programs.py::test_a_program_does_its_task_and_each_token_has_loss_once[openai-agents-chat]",
    ),
}
"""By what stays: the cases."""


def is_further(nodeid: str) -> bool:
    """True if the suite leaves the test `nodeid` to those who ask for every case."""
    return nodeid in _CASES


_CASES = frozenset(case for cases in FURTHER_CASES.values() for case in cases)
