"""What the programs of this folder run, by name; without torch, for the tests that start them."""

import itertools

PRESETS = ("fp32", "bf16", "fp16", "bf16-master", "fp16-master")
OPTIMIZERS = ("torch.AdamW", "mezzo.AdamW", "mezzo.SGD", "torch.SGD", "torch.Muon")
RUNS = (
    *itertools.product(PRESETS, OPTIMIZERS, ("plain", "clip")),
    *itertools.product(PRESETS, OPTIMIZERS[:2], ("accumulation",)),  # which no optimizer sees
)
"""Policy, optimizer and way of the steps."""
STEPS = 5

LOOKED_AT = 3
"""The first steps, which mezzo looks at closely, with reads."""
CHECKS = (
    "flags_of_another_device_than_the_current_are_not_read_early",
    "another_stream_than_the_default_works_alike",
    "one_optimizer_steps_two_devices",
    "a_rate_on_another_device_is_not_read",
    "a_scale_is_not_used_on_the_host_before_it_is_there",
    "tables_are_not_lent_to_another_stream",
    "a_table_in_use_is_not_written_when_a_cache_drops_it",
    "kept_casts_belong_to_a_stream",
    "modules_take_kept_casts_by_themselves",
    "a_device_on_which_triton_fails_is_told_from_others",
    "a_device_that_mezzo_has_no_kernel_for_takes_torchs_fused_one",
    "masters_of_16_bit_weights_are_stepped_by_torchs_fused_kernel",
    "dampened_sgd_is_stepped_end_to_end",
    "many_weights_are_stepped_in_the_launches_of_few",
    "a_rate_on_the_host_is_not_copied",
    "a_step_that_is_looked_at_reads_once",
    "what_is_timed_has_run",
    "whether_a_step_was_taken_is_asked_without_waiting",
    "a_batch_does_not_wait",
    "a_trace_does_not_look_at_what_has_not_landed",
    "a_device_without_fp64_runs",
    "runs_are_compared_on_a_device_without_fp64",
    "a_healthy_step_decides_in_few_launches",
    "a_decision_by_triton_is_one_launch",
    "steps_by_triton_are_those_of_torchs_ops",
    "a_layer_norm_with_fp32_weights_is_three_launches",
    "a_layer_norm_by_triton_is_seen_by_a_trace",
    "an_optimizer_that_torch_could_fuse_is_named",
    "kernels_that_cannot_be_compiled_are_replaced_with_one_sentence",
    "batch_norms_are_taken_back_at_once",
    "the_norm_pass_launches_alike_for_any_size",
    "steps_of_any_optimizer_of_torch_are_undone_on_the_device",
    "an_optimizer_that_may_not_stand_nan_is_read_for_once",
    "a_graph_of_others_makes_its_own_casts",
    "a_step_in_a_captured_graph_is_refused",
    "random_state_of_every_device_is_given_back",
    "replay_knows_the_dropout_of_the_batch",
    "a_checkpoint_goes_on_where_it_was",
)
GRAPH_CHECKS = (
    "replays_are_eager_steps",
    "norms_take_the_host_little_and_a_graph_the_device",
    "what_a_forward_casts_of_its_own_stays_where_a_graph_reads_it",
    "a_replay_is_one_launch_and_stops_for_nothing",
    "tables_of_a_graph_live_as_long_as_it",
    "memory_that_a_graph_reads_is_missed_when_freed",
    "kept_casts_are_made_inside_the_graph",
    "what_cannot_be_captured_is_refused_by_name",
    "optimizers_and_policies_that_need_the_host_are_refused",
    "what_changed_since_is_refused_by_name",
    "other_threads_pin_memory_while_a_step_is_captured",
    "a_rate_on_the_device_is_scheduled_between_replays",
    "a_run_that_cannot_go_on_stops_while_it_is_replayed",
)
"""What holds of captured steps."""
