"""--system, --template_args and --no-chat: prompts for a chat model, the same in grpo.py,
evaluate.py and generate.py."""

import json
import re

import pytest
import torch.distributed as dist
from chats import chat_folder
from policy import TINY, hf_folder, run, steps_of
from runs import json_lines
from saves import refuses

import evaluate
import generate
import grpo
from corpus.chat import read_template
from flags.config import parse_config
from rl import rollouts
from rl.datasets import Text
from rl.sample import Sample
from storage.prompt import open_chat, read_values

# Like Qwen3: an empty thought in the prompt switches thinking off
THINKING = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
{%- if effort is defined %}{{- 'Effort: ' + (effort * 2) | string }}{%- endif %}
"""
OFF = "enable_thinking=False"


def folder_of(path, template: str) -> str:
    folder = chat_folder(path, "qwen3")
    (folder / "chat_template.jinja").write_text(template)
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize(
    "system, args, values",
    [
        ("", "", {}),
        ("Be brief.\\nNumbers only. ", "", {}),
        ("", OFF, {"enable_thinking": False}),
        ("Be brief.", "effort=3, enable_thinking=true", {"effort": 3, "enable_thinking": True}),
    ],
)
def test_prompts_are_those_of_transformers_in_all_programs(tmp_path, system, args, values):
    from transformers import PreTrainedTokenizerFast

    folder = folder_of(tmp_path / "model", THINKING)
    messages = [{"role": "system", "content": system.replace("\\n", "\n")}] * bool(system)
    messages.append({"role": "user", "content": "What is 1+1?"})
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", chat_template=THINKING
    )
    wanted = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **values
    )
    for cfg in (
        grpo.Config(init_from=folder, system=system, template_args=args),
        evaluate.Config(checkpoint=folder, chat=True, system=system, template_args=args),
        generate.Config(checkpoint=folder, chat=True, system=system, template_args=args),
    ):
        assert open_chat(folder, cfg)("What is 1+1?") == wanted
    text = Text(
        folder,
        chat=open_chat(folder, grpo.Config(init_from=folder, system=system, template_args=args)),
    )
    assert text.tokenizer.decode(text.prompt("What is 1+1?"), skip_special_tokens=False) == wanted
    # markers are tokens
    assert text.prompt("What is 1+1?")[0] == text.tokenizer.token_to_id("<|im_start|>")


def test_without_the_template_a_prompt_is_as_it_is(tmp_path):
    folder = folder_of(tmp_path / "model", THINKING)
    for cfg in (
        grpo.Config(init_from=folder, chat=False),
        evaluate.Config(checkpoint=folder),
        generate.Config(),
    ):
        assert open_chat(folder, cfg) is None
    text = Text(folder, chat=open_chat(folder, grpo.Config(init_from=folder, chat=False)))
    assert text.tokenizer.decode(text.prompt("1+1=")) == "1+1="


def test_values_of_a_template():
    assert read_values("a=true,b = FALSE, c=3,d=-2.5,e=1e3,f=no,g=") == dict(
        a=True, b=False, c=3, d=-2.5, e=1e3, f="no", g=""
    )
    assert type(read_values("c=3")["c"]) is int
    assert read_values("") == {}


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            dict(template_args="enable_thinkin=false"),
            "does not ask for enable_thinkin; it asks for effort, enable_thinking",
        ),
        (dict(template_args="messages=1"), "does not ask for messages"),
        (dict(template_args="enable_thinking"), "'enable_thinking' is no name=value"),
        (dict(template_args="effort=1,effort=2"), "or its name is there twice"),
        (
            dict(template_args="enable_thinking=no"),
            "--template_args enable_thinking=no: it changes nothing in a prompt",
        ),
        (dict(template_args="effort=much,enable_thinking=0.5"), ""),
        (dict(system="user"), ""),
        (
            dict(system="Be brief", chat=False),
            "--system Be brief: there is no chat template without --chat or in a model that "
            "begins from nothing",
        ),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path, flags, message):
    folder = folder_of(tmp_path / "model", THINKING)
    cfg = grpo.Config(init_from=folder, **flags)
    if not message:
        assert open_chat(folder, cfg)
        return
    refuses(re.escape(message), open_chat, folder, cfg)


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "does not show it",
        ),
        (
            "You are kind. {{ messages[-1].content }}{% if messages|length > 1 %}{% endif %}",
            "does not show it, or shows it anyway",
        ),
        (
            "{% if messages[0].role != 'user' %}{{ raise_exception('no system here') }}{% endif "
            "%}{{ messages[0].content }}",
            "no system here",
        ),
    ],
)
def test_a_system_message_that_the_template_leaves_out_is_refused(tmp_path, template, message):
    folder = folder_of(tmp_path / "model", template)
    refuses(
        re.escape(message), open_chat, folder, generate.Config(chat=True, system="You are kind.")
    )
    assert open_chat(folder, generate.Config(chat=True))("2?").endswith("2?")


@pytest.mark.parametrize("flags", [dict(system="x"), dict(template_args=OFF)], ids=str)
def test_where_there_is_no_template_nothing_is_asked_of_it(tmp_path, flags):
    folder = folder_of(tmp_path / "model", THINKING)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    for where, message in [
        (folder, "has no chat template"),
        ("", "there is no chat template without --chat or in a model"),
    ]:
        refuses(message, open_chat, where, grpo.Config(init_from=where, **flags))
        assert (
            open_chat(where, grpo.Config(init_from=where))
            is None
            is open_chat(where, grpo.Config(chat=False))
        )


def test_names_that_a_template_asks_for(tmp_path):
    """Names with a default in the template (DeepSeek) count; the usual values of every template do
    not."""
    template = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}{{ eos_token }}"
    template += "{{ messages[0].content }}{{ raise_exception('x') if thinking else '' }}{% set a = 1 %}{{ a }}"
    folder = folder_of(tmp_path / "model", template)
    # the tokenizer has no bos_token
    assert read_template(folder, "x").names == {"thinking", "bos_token"}


@pytest.mark.parametrize("program", [generate, evaluate])
def test_the_programs_ask_as_their_flags_say(program, tmp_path, capsys, monkeypatch):
    """Token ids of the prompt: with the system message, and the empty thought at the end."""
    asked = []

    def noted(model, prompts, noise, *args, **options):
        asked.extend(prompts)
        return [Sample(ids=[2], logprobs=[0.0], mask=[1.0]) for _ in prompts]

    hf_folder(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    argv = [
        "--checkpoint",
        str(tmp_path),
        "--chat",
        "--system",
        "Be brief.",
        "--template_args",
        OFF,
        "--max_new_tokens",
        "4",
    ]
    if program is generate:
        monkeypatch.setattr(generate, "rollout", noted)
        generate.main([*argv, "--device", "cpu", "--prompt", "1+1?"])
    else:
        monkeypatch.setattr(evaluate, "rollout", noted)
        (tmp_path / "task.jsonl").write_text('{"question": "1+1?", "answer": 2}\n')
        if dist.is_initialized():
            dist.destroy_process_group()
        task = ["--device", "cpu", "--task", str(tmp_path / "task.jsonl")]
        evaluate.main(parse_config(evaluate.Config, [*argv, *task]))
    assert asked == [
        Text(
            str(tmp_path),
            chat=open_chat(
                str(tmp_path),
                grpo.Config(init_from=str(tmp_path), system="Be brief.", template_args=OFF),
            ),
        ).prompt("1+1?")
    ]
    usual = open_chat(str(tmp_path), grpo.Config(init_from=str(tmp_path)))
    assert len(asked[0]) > len(Text(str(tmp_path), chat=usual).prompt("1+1?")) + 10


# ---------------------------------------------------------------- runs


def test_samples_are_made_with_it(tmp_path):
    """A batch sampled with other chat options is sampled again; with the same options the batch is
    kept."""

    def cfg(**flags):
        return grpo.Config(init_from="hf", **flags)

    ((name, content),) = rollouts.pack_batches([{"samples": []}], cfg(system="a")).items()
    (tmp_path / name).write_bytes(content)
    assert rollouts.reuse_batches({"ahead": 1}, str(tmp_path), cfg(system="a"), True) == [
        {"samples": []}
    ]
    for other in (cfg(system="b"), cfg(), cfg(system="a", template_args=OFF), cfg(chat=False)):
        assert rollouts.reuse_batches({"ahead": 1}, str(tmp_path), other, True) == []


@pytest.mark.slow
def test_a_run_with_chat_options_is_continued_without_them(tmp_path):
    hf_folder(tmp_path / "hf", "qwen3")
    rules = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    rules.pop("chat_template", None)
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(rules))
    (tmp_path / "hf" / "chat_template.jinja").write_text(THINKING)
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--seq_len",
        64,
        "--eval_every",
        0,
        "--init_from",
        tmp_path / "hf",
    ]
    flags += ["--out", tmp_path / "run"]
    asked = ["--system", "Be brief.", "--template_args", OFF, "--async_steps", 1]
    run(1, *flags, *asked, "--steps", 2, "--checkpoint_every", 1)
    said = run(1, *flags, *asked[4:], "--no-chat", "--load_step", 1, "--steps", 3)
    assert "the batch in the checkpoint was made with other flags" in said
    assert "--system Be brief. -> " in said
    shown = json_lines(tmp_path / "run" / "samples.jsonl")
    prompts = {}
    for step in (1, 2, 3):
        prompts[step] = {s["prompt"] for s in shown if s["step"] == step}
    for prompt in prompts[1]:
        assert re.fullmatch(
            r"<\|im_start\|>system\nBe brief.<\|im_end\|>\n<\|im_start\|>user\n(?s:.*)</think>\n\n",
            prompt,
        )
    for prompt in prompts[2] | prompts[3]:
        assert re.fullmatch(r"\d+>", prompt)
    assert len(steps_of(tmp_path / "run")) == 3
