"""Flags that no row of flags/test_flags.py can try, and the test of the effect of each, held by
flags/test_flags_elsewhere.py."""

# what needs a GPU of its kind is a row of `make gpu-report`
ELSEWHERE = {
    "benchmarks/gpu_report.py": "async_tp float8_all_gather memory_snapshot",
    "tests/training/test_metrics.py::test_plot_draws_the_curves_of_a_run_that_has_ended": "plot",
    "tests/tools/test_replay.py::test_flags_of_the_layout_may_be_others": "replay",
    "tests/tools/test_versions.py::test_one_commit_of_forty_is_found": "bisect",
    "tests/tools/test_versions.py::test_bits_and_rounding": "expect",
    # need a model with a chat template
    "tests/rl/test_asking.py::test_the_programs_ask_as_their_flags_say": (
        "chat system template_args"
    ),
    # need several processes, or a server
    "tests/rl/test_rollouts.py::test_separate_generators_equal_the_emulation": "gen_ranks",
    "tests/rl/test_http_engine.py::test_weights_reach_the_server": (
        "engine engine_adapters engine_seed engine_weights"
    ),
}
