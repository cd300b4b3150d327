"""Flags that no row of test_flags.py can try: each has a test of its effect in another file, named
here; and so has each flag of the programs that are not in that table."""

import ast
import contextlib
import dataclasses
import io
import json
import re
import sys
from unittest import mock

import numpy as np
import pytest
from chats import bpe
from elsewhere import ELSEWHERE
from programs import REPO
from tokenizers import processors

import ablate
import evaluate
from corpus import commands as data_commands
from storage import commands as checkpoint_commands

EVALUATE = {
    "tests/test_evaluate.py::test_a_run_a_step_and_the_folder_that_it_came_from": (
        "checkpoint task out"
    ),
    "tests/test_evaluate.py::test_every_token_of_a_text_is_scored_once": "limit seq_len stride",
    "tests/test_evaluate.py::test_answers_are_those_of_transformers": (
        "local_batch_size max_new_tokens prompt_template stop"
    ),
    "tests/test_evaluate.py::test_prompts": "shots shots_file",
    "tests/test_evaluate.py::test_what_is_right_can_be_said": "answers",
    "tests/test_evaluate.py::test_samples_depend_on_their_question_alone": "temperature seed",
    "tests/flags/test_flags_elsewhere.py::test_evaluate_waits_for_other_ranks": (
        "rollout_timeout_s"
    ),
}
ABLATE = {
    "tests/test_ablate.py::test_a_study_continues_after_a_kill": "vary out",
    "tests/test_ablate.py::test_verdicts": "variant baseline metric",
    "tests/test_ablate.py::test_equal_flags_are_identical": "seeds nproc",
    "tests/test_ablate.py::test_until_stops_at_a_difference_that_is_small_enough": "until noise",
    "tests/test_ablate.py::test_a_planted_difference_is_found_with_a_third_of_the_runs": (
        "max_seeds"
    ),
    "tests/test_ablate.py::test_a_fork_meets_a_commit": "tune tune_seeds budget only",
    "tests/test_ablate.py::test_equal_variants_over_sizes": (
        "ladder tokens_per_parameter ladder_to"
    ),
    "tests/test_ablate.py::test_what_is_good_follows_from_the_metric": "best",
    "tests/test_ablate.py::test_report": "reach report collect",
    "tests/tools/test_campaign.py::test_a_campaign_and_again_from_its_folder": (
        "campaign candidate layouts final"
    ),
    "tests/tools/test_curves.py::test_the_command_line": "watch picture",
    "tests/test_ablate.py::test_more_runs_at_once_than_gpus_are_refused": "jobs",
}
DATA = {
    "tests/test_data.py::test_stdlib_corpus": "cache_dir",
    "tests/test_data.py::test_own_tokenizer": "vocab_size input out",
    "tests/test_data.py::test_eot_is_found": "eot",
    "tests/flags/test_flags_elsewhere.py::test_documents_begin_as_the_tokenizer_begins_a_text": (
        "bos"
    ),
    "tests/sft/test_chat_data.py::test_bad_conversations_are_left_out_and_listed": "skip_bad",
    "tests/corpus/test_spelling.py::test_a_loss_is_warned_of_and_refused": "max_lost",
    "tests/corpus/test_from_datasets.py::test_a_subset": "from_datasets subset",
    "tests/corpus/test_from_datasets.py::test_conversations_and_a_saved_dataset": "split",
    "tests/test_data.py::test_prepare_in_processes": "workers",
    "tests/test_data.py::test_prepare_in_shares": "shard",
    "tests/flags/test_flags_elsewhere.py::test_so_many_documents_are_shown": "n",
    "tests/corpus/test_readers.py::test_columns": "text_column",
    "tests/corpus/test_chat.py::test_show": "tokenizer",
}
CHECKPOINT = {
    "tests/test_checkpoint.py::test_the_mean_of_sharded_steps_is_that_by_hand": "last steps",
    "tests/storage/test_hf.py::test_from_hf_and_to_hf": "dtype max_shard_gb",
    "tests/lora/test_adapters.py::test_merged_weights_and_the_adapter_give_the_same_logits_in_"
    "transformers_and_here": "adapter",
}


def source_of(place: str) -> str:
    """The source of a test, with its decorators and with what it uses of its file."""
    file, _, test = place.partition("::")
    text = (REPO / file).read_text()
    if not test:
        return text
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        names = [getattr(node, "name", "")]
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        for name in names:
            found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    assert test in found, f"there is no {place}"
    own = found[test]
    used = [found[name] for name in set(re.findall(r"\w+", own)) & found.keys() - {test}]
    return "\n".join([own, *used])


def flags_tested(table: dict[str, str]) -> list[str]:
    """The flags of a table, each of which its test must spell: --flag, flag=, "flag"."""
    flags = []
    for place, words in table.items():
        source = source_of(place)
        for flag in words.split():
            assert re.search(rf"--{flag}\b|\b{flag}=|\"{flag}\"", source), (flag, place)
            flags.append(flag)
    assert len(flags) == len(set(flags))
    return flags


def flags_in_help(main, *command: str) -> set[str]:
    """The flags that a program's --help tells."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["program.py", *command, "--help"]),
        contextlib.redirect_stdout(said),
        pytest.raises(SystemExit),
    ):
        main()
    flags = set()
    _, _, options = said.getvalue().rpartition("\noptions:\n")
    for line in options.splitlines():
        if re.match(r"  -", line):
            flags |= set(re.findall(r"--(\w+)", line.strip().partition("  ")[0]))
    return flags - {"help", "version"}


def test_flags_without_a_row_have_a_test():
    assert flags_tested(ELSEWHERE)


def test_every_flag_of_evaluate_has_a_test():
    """The groups of layouts and of chats, which other recipes have as well, are in test_flags.py."""
    own = {field.name for field in dataclasses.fields(evaluate.Config)}
    for group in evaluate.Config.__mro__[1:-1]:
        if group.__module__ != "evaluate":
            own -= {field.name for field in dataclasses.fields(group)}
    assert set(flags_tested(EVALUATE)) == own


def test_every_flag_of_ablate_has_a_test():
    assert set(flags_tested(ABLATE)) == flags_in_help(lambda: ablate.parse(["--help"]))


def test_every_flag_of_data_has_a_test():
    flags = set()
    for command in ("stdlib", "tokenizer", "prepare", "show", "check"):
        flags |= flags_in_help(data_commands.main, command)
    assert set(flags_tested(DATA)) == flags


def test_every_flag_of_checkpoint_has_a_test():
    flags = set()
    for command in ("ls", "verify", "diff", "average", "to_hf", "from_hf"):
        flags |= flags_in_help(lambda: checkpoint_commands.main(sys.argv[1:]), command)
    assert set(flags_tested(CHECKPOINT)) == flags


def test_a_flag_that_its_test_does_not_spell_is_told():
    table = {
        "tests/training/test_metrics.py::test_plot_draws_the_curves_of_a_run_that_has_ended": ""
    }
    (place,) = table
    with pytest.raises(AssertionError, match="no_such_flag"):
        flags_tested({place: "no_such_flag"})
    with pytest.raises(AssertionError, match="there is no .*test_of_nothing"):
        flags_tested({"tests/training/test_metrics.py::test_of_nothing": "plot"})


# ---------------------------------------------------------------- effects without another place


@pytest.fixture
def documents(tmp_path):
    """(a file of five documents, a tokenizer that begins a text with <s>)"""
    tokenizer = bpe("some words and more words", 300)
    tokenizer.add_special_tokens(["<s>", "<|endoftext|>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": f"words and {i} more"}) + "\n" for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return tmp_path / "a.jsonl", tmp_path / "tokenizer.json", begin


def run_data(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, words)])
    data_commands.main()


def test_documents_begin_as_the_tokenizer_begins_a_text(documents, tmp_path, monkeypatch):
    file, tokenizer, begin = documents
    ids = {}
    for out, flags in (("without", []), ("with", ["--bos"])):
        words = ["--input", file, "--tokenizer", tokenizer, "--out", tmp_path / out]
        run_data(monkeypatch, "prepare", *words, "--workers", 1, *flags)
        ids[out] = np.concatenate(
            [np.load(path) for path in sorted((tmp_path / out).glob("*.npy"))]
        )
    assert (ids["without"] != begin).all()
    assert (ids["with"] == begin).sum() == 5
    assert (ids["with"][ids["with"] != begin] == ids["without"]).all()


def test_so_many_documents_are_shown(documents, monkeypatch, capsys):
    file, tokenizer, _ = documents
    for flags, n in ((["--n", 2], 2), ([], 3)):
        run_data(monkeypatch, "show", file, "--tokenizer", tokenizer, *flags)
        assert capsys.readouterr().out.count("--- document ") == n


def test_evaluate_waits_for_other_ranks(tmp_path):
    """--rollout_timeout_s is the patience of the groups in which ranks wait for answers."""
    asked = []

    def note(layout, seconds):
        asked.append(seconds)
        raise StopIteration

    text = mock.Mock(ends=[], decode=str)
    layout = mock.Mock(world_size=1, data_rank=0, data_ranks=1, local_batch_size=1, tp=1)
    cfg = evaluate.Config(checkpoint="not read", task="not read", rollout_timeout_s=99)
    with mock.patch.object(evaluate, "lockstep", note), pytest.raises(StopIteration):
        evaluate.complete(mock.MagicMock(), layout, cfg, text, [[1, 2]])
    assert asked == [99]
