"""grpo.py --engine: the same run as in place, when the server samples with our own decoder; and
servers that go wrong."""

import contextlib
import json
import math
import os
import re
import socket
import threading
import time

import pytest
import torch
from engine_server import Engine, serving
from policy import (
    SAME,
    SMALL,
    TINY,
    assert_same,
    evaluations,
    hf_folder,
    run,
    sharp_model,
    steps_of,
)
from programs import hold_port, port_of
from runs import REPO
from saves import refuses

from grpo import Config
from rl import http_engine
from rl.http_engine import Server, check_server, wrong_sample
from storage.hf import save_hf
from storage.manifest import verify

ENDS = [0]


# ---------------------------------------------------------------- whole runs
@pytest.mark.parametrize(
    "kind, processes, flags, layout",
    [
        (
            "vllm",
            1,
            ["--temperature", 0.7, "--async_steps", 1, "--dynamic_sampling", 1, "--eval_every", 1],
            [],
        ),
        pytest.param(
            "sglang", 2, ["--async_steps", 2, "--eval_every", 3], [], marks=pytest.mark.slow
        ),
        pytest.param(
            "vllm",
            2,
            [
                "--kl_coef",
                0.1,
                "--minibatches",
                2,
                "--tis",
                2,
                "--model_args",
                SMALL + ",tie_embeddings=true",
                "--eval_every",
                1,
            ],
            ["--pp", 2],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["vllm, one step ahead", "sglang, two ranks, two steps ahead", "a pipeline"],
)
def test_a_server_gives_the_run_that_is_sampled_in_place(tmp_path, kind, processes, flags, layout):
    flags, engine = (
        [*SAME, "--steps", 4, "--lr", "2e-2", "--warmup_steps", 0, "--abort_k3", 0, *flags],
        Engine(kind),
    )
    with serving(engine) as url:
        said = run(
            processes,
            *flags,
            *layout,
            "--engine",
            url,
            "--engine_seed",
            "--rollout_rows",
            12,
            "--out",
            tmp_path / "server",
        )
    run(1, *flags, "--out", tmp_path / "place")
    there, here = steps_of(tmp_path / "server"), steps_of(tmp_path / "place")
    assert_same(there, here, 1e-5)
    assert [line["staleness"] for line in there] == [line["staleness"] for line in here]
    assert evaluations(tmp_path / "server") == evaluations(tmp_path / "place")
    assert len(engine.folders) >= 4
    # else any version would give these
    assert len({line[1:] for line in evaluations(tmp_path / "place")}) > 1
    # each version was removed after the next
    assert f"by {url}" in said
    assert os.listdir(tmp_path / "server" / "engine") == []
    assert not any(os.path.exists(folder) for folder in engine.folders)


@pytest.mark.parametrize(
    "kind, env",
    [
        ("vllm", "tests/env_turns.py"),
        pytest.param("sglang", "rl/tasks/wordle.py", marks=pytest.mark.slow),
    ],
)
def test_turns_go_on_behind_the_reply_of_the_environment(tmp_path, kind, env):
    """Greedy samples are those in place. Others have other noise, but the trainer finds the
    server's log-probabilities."""
    flags = [
        *TINY,
        "--steps",
        2,
        "--eval_every",
        2,
        "--log_samples",
        99,
        "--sft_steps",
        9,
        "--seq_len",
        40,
        "--max_new_tokens",
        30,
    ]
    flags[flags.index("--env") + 1] = REPO / env
    with serving(Engine(kind)) as url:
        run(1, *flags, "--engine", url, "--out", tmp_path / "server")
    run(1, *flags, "--out", tmp_path / "place")
    there, here = (
        [json.loads(line) for line in (tmp_path / out / "samples.jsonl").read_text().splitlines()]
        for out in ("server", "place")
    )
    greedy = [
        [s["completion"] for s in samples if s["evaluation"] and s["step"] == 0]
        for samples in (there, here)
    ]
    assert greedy[0] == greedy[1]
    assert len(set(greedy[0])) > 1
    # Which samples are drawn depends on the order in which the requests reach the server, and so do
    # the shares of tool calls (0.3 per step is not reached in one step of a hundred). No tool call in
    # the whole run has a probability of 1e-9.
    steps = steps_of(tmp_path / "server")
    assert len(steps) == 2, "the run has two steps"
    for line in steps:
        assert line["logprob_max_diff"] < 1e-4, line
    tool_calls = [line["tool_calls"] for line in steps]
    assert sum(tool_calls) > 0, "no sample of the run has called the tool"
    if kind == "vllm":
        for line in steps:
            drawn = [
                s["completion"] for s in there if not s["evaluation"] and s["step"] == line["step"]
            ]
            for completion in drawn:
                assert not re.search("7(?!12|1?$)", completion), f"no reply in {completion!r}"
            sevens = sum(completion.count("7") for completion in drawn)
            replies = sum(completion.count("712") for completion in drawn)
            calls = line["tool_calls"] * len(drawn)
            assert replies <= calls, f"step {line['step']}: more replies than calls"
            assert calls <= sevens, f"step {line['step']}: more calls than asked for"


@pytest.mark.parametrize(
    "kind, processes, way, layout",
    [
        ("llama", 2, "adapters", []),
        ("llama", 2, "nccl", ["--pp", 2]),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("llama", 1, "merged", []),
                ("llama", 2, "merged", ["--pp", 2]),
                ("llama", 3, "adapters", ["--pp", 3]),
                ("deepseek_v3", 2, "nccl", ["--ep", 2]),
            )
        ),
    ],
    ids=str,
)
def test_weights_reach_the_server(tmp_path, kind, processes, way, layout):
    """Of three stages the last has none of the three layers, and so no adapters. nccl:
    rl/nccl_engine.py, over gloo."""
    hf_folder(tmp_path / "hf", kind, std=0.3, n_layers=3)
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--init_from",
        tmp_path / "hf",
        "--seq_len",
        64,
        "--max_new_tokens",
        12,
        "--steps",
        3,
        "--eval_every",
        0,
        "--lr",
        "1e-2",
        "--warmup_steps",
        0,
        "--kl_coef",
        0.1,
    ]
    over_nccl, lora = way == "nccl", [] if way == "nccl" else ["--lora_rank", 4]
    run(1, *flags, *lora, "--out", tmp_path / "place")
    engine = Engine("vllm", from_hf=tmp_path / "hf" if over_nccl else None)
    with serving(engine) as url:
        run(
            processes,
            *flags,
            *lora,
            *layout,
            *["--engine_adapters"] * (way == "adapters"),
            "--engine",
            url,
            "--engine_seed",
            "--engine_weights",
            "nccl" if over_nccl else tmp_path / "weights",
            "--out",
            tmp_path / "server",
            program="tests/gloo_nccl.py" if over_nccl else "grpo.py",
        )
    # of a request's model
    assert (engine.name == os.path.basename(engine.folders[-1])) == (way == "adapters")
    assert [os.path.dirname(read) for read in engine.folders] == 3 * [
        str(tmp_path / ("" if over_nccl else "weights"))
    ]
    # a rank without adapters once wrote a file that no manifest had
    verify(f"{tmp_path}/server/checkpoints/step-3")
    assert_same(steps_of(tmp_path / "server"), steps_of(tmp_path / "place"), 1e-5)
    assert max(line["logprob_max_diff"] for line in steps_of(tmp_path / "server")) < 1e-4


@pytest.mark.slow
def test_a_server_that_dies_costs_nothing(tmp_path):
    """One line, the checkpoint stays, and the run goes on with another server as if nothing had
    been."""
    flags, out, answers = [*SAME, "--steps", 5, "--checkpoint_every", 1], tmp_path / "run", []

    def dies(path, answer):
        answers.append(path)
        if answers.count("/v1/completions") > 10:  # in the third step
            raise ConnectionAbortedError
        return answer

    with serving(Engine("vllm", dies)) as url:
        said = run(1, *flags, "--engine", url, "--engine_seed", "--out", out, status=1)
    ours = [line for line in said.splitlines() if "--engine" in line]
    assert len(ours) == 1
    assert "no answer to /v1/completions (RemoteDisconnected" in ours[0]
    assert "Traceback" not in said
    assert [line["step"] for line in steps_of(out)] == [1, 2]
    assert "step-2" in os.listdir(out / "checkpoints")
    with serving(Engine("sglang")) as url:
        assert "continuing from" in run(1, *flags, "--engine", url, "--out", out)
    run(1, *flags, "--out", tmp_path / "place")
    assert_same(steps_of(out), steps_of(tmp_path / "place"), 1e-5)


@pytest.mark.slow
def test_a_server_that_was_started_again_ends_the_run(tmp_path):
    with serving(
        Engine("vllm", spoiled(lambda answer: {"weight_version": "default"}, ["/weight_info"]))
    ) as url:
        said = run(1, *SAME, "--steps", 1, "--engine", url, "--out", tmp_path, status=1)
    assert "it has the weights 'default' and not " in said
    assert not (tmp_path / "checkpoints").exists()


# ---------------------------------------------------------------- what a server may answer
@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "policy"
    save_hf(sharp_model(), str(folder), torch.float32)
    return str(folder)


def ask(url, weights, version="7", timeout_s=600.0):
    """Samples of a prompt, asked for as by the engine."""
    server = Server(url, 600.0)
    server.load(weights, version)
    server.timeout = timeout_s
    found = server.sample([3, 4, 5], 4, 9, 1.0, ENDS, 1, {})
    server.check_version()
    for sample in found:
        if wrong := wrong_sample(*sample, 9, ENDS, 24, False):
            server.fail(wrong)
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_both_kinds_answer_alike(weights, kind):
    with serving(Engine(kind)) as url:
        found = ask(url, weights)
    with serving(Engine("vllm")) as url:
        assert found == ask(url, weights)
    assert len(found) == 4
    assert {reason for _, _, reason in found} == {"stop", "length"}
    assert all((reason == "stop") == (ids[-1] in ENDS) for ids, _, reason in found)


def spoiled(change, at=("/v1/completions", "/generate")):
    return lambda path, answer: change(answer) if path in at else answer


def with_fields(**fields):
    """The first sample of vLLM, or the second of SGLang, with other values."""

    def change(answer):
        (answer["choices"][0] if "choices" in answer else answer[1]["meta_info"]).update(fields)
        return answer

    return spoiled(change)


def two_nans(answer):
    answer["choices"][2]["logprobs"]["token_logprobs"][:2] = [math.nan] * 2
    return answer


GIVEN_UP = threading.Event()  # the client of a slow server no longer waits


def slow(answer):
    GIVEN_UP.wait(60)
    return answer


FAULTS = {
    "no JSON": (
        "vllm",
        spoiled(lambda answer: b"<html>busy"),
        "form, JSONDecodeError Expecting value",
    ),
    "no choices": (
        "vllm",
        spoiled(lambda answer: {"error": "busy"}),
        "answers in another form, KeyError 'choices' in b'{",
    ),
    "no ids": ("vllm", with_fields(token_ids=None), "a log-probability for each"),
    "no log-probabilities": (
        "vllm",
        with_fields(logprobs=None),
        "/v1/completions answers in another form, TypeError",
    ),
    "too few": (
        "vllm",
        spoiled(lambda answer: {"choices": answer["choices"][1:]}),
        "3 samples came back where 4",
    ),
    "an id outside": (
        "vllm",
        with_fields(token_ids=[24], logprobs={"token_logprobs": [-1.0]}),
        "the id [24] is none",
    ),
    "an id that is none": (
        "sglang",
        with_fields(output_token_logprobs=[[-1.0, 2.5, None]]),
        "id [2.5] is none of the model's",
    ),
    "nan": (
        "vllm",
        spoiled(two_nans),
        "[nan] is no log-probability; vLLM needs --logprobs-mode processed_logprobs",
    ),
    "logits": (
        "sglang",
        with_fields(output_token_logprobs=[[3.5, 0, None]]),
        "[3.5] is no log-probability",
    ),
    "behind its end": (
        "vllm",
        with_fields(token_ids=[0, 5, 0], logprobs={"token_logprobs": [-1.0] * 3}),
        "only the last",
    ),
    "no end": (
        "vllm",
        with_fields(token_ids=[5], logprobs={"token_logprobs": [-1.0]}, finish_reason="stop"),
        "'stop' after 1 of 9 ids, the last 5; only",
    ),
    "cut off": (
        "vllm",
        with_fields(token_ids=[5], logprobs={"token_logprobs": [-1.0]}, finish_reason="length"),
        "'length' after 1 of 9 ids, the last 5; only",
    ),
    "aborted": (
        "sglang",
        with_fields(finish_reason={"type": "abort"}),
        "its finish_reason is 'abort'",
    ),
    "not reloaded": (
        "sglang",
        spoiled(
            lambda answer: {"success": False, "message": "gone"}, ["/update_weights_from_disk"]
        ),
        "it did not read",
    ),
    "an old version": (
        "sglang",
        with_fields(weight_version="6"),
        "it has the weights '6' and not '7'",
    ),
    "started again": (
        "vllm",
        spoiled(lambda answer: {"weight_version": "default"}, ["/weight_info"]),
        "weights 'default' and",
    ),
    "busy": (
        "vllm",
        spoiled(lambda answer: {"success": False}, ["/reset_prefix_cache"]),
        "must be this run's alone",
    ),
    "a model that is a text": (
        "vllm",
        spoiled(lambda answer: {"data": ["policy"]}, ["/v1/models"]),
        "/v1/models answers in",
    ),
    "a list of a reload": (
        "sglang",
        spoiled(lambda answer: [1], ["/update_weights_from_disk"]),
        "answers in another form",
    ),
    "slow": (
        "vllm",
        spoiled(slow),
        "no answer to /v1/completions (TimeoutError: the answer does not end; the limit is 0.5 s)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_nonsense_is_refused_in_one_line(weights, name):
    kind, fault, message = FAULTS[name]
    with serving(Engine(kind, fault)) as url:
        refuses(
            f"^--engine {url}: .*{re.escape(message)}",
            ask,
            url,
            weights,
            timeout_s=0.5 if name == "slow" else 600.0,
        )
        if name == "slow":
            GIVEN_UP.set()


def test_a_server_is_looked_for_before_anything_is_built(weights, request):
    holder = hold_port()
    request.addfinalizer(holder.close)
    port = port_of(holder)
    cfg = Config(engine=f"127.0.0.1:{port}")
    refuses("no answer to /v1/models .ConnectionRefused.* start it", check_server, cfg)
    with (
        serving(Engine("llama.cpp"), port),
        pytest.raises(ValueError, match="owned_by 'llama.cpp'; it must be"),
    ):
        check_server(cfg)
    with serving(Engine("vllm"), port):
        check_server(cfg)
        longer = Config(engine=cfg.engine, seq_len=128)
        refuses(
            "at most 64 tokens; start it with --max-model-len .* 128, which", check_server, longer
        )


def test_an_older_vllm_cannot_tell_its_version(weights):
    with serving(Engine("vllm", tells=False)) as url:
        assert not Server(url, 600.0).tells
        assert len(ask(url, weights)) == 4


@pytest.mark.parametrize(
    "kind, adapters, words",
    [
        ("vllm", False, "know /collective_rpc; start vLLM with VLLM_SERVER_DEV_MODE=1$"),
        ("sglang", False, "_from_disk$"),
        (
            "vllm",
            True,
            "know /v1/load_lora_adapter; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
            "--enable-lora",
        ),
    ],
)
def test_a_server_that_takes_no_weights_is_refused_before_anything_is_built(kind, adapters, words):
    class Plain(Engine):
        def answer(self, path, body):
            return (
                (404, {"detail": "Not Found"})
                if path != "/v1/models"
                else super().answer(path, body)
            )

    with serving(Plain(kind)) as url:
        refuses(words, Server, url, 600.0, adapters)


def test_ids_that_the_tokenizer_lacks_are_never_sampled(weights):
    """As in place: their probability is 0 on both sides."""
    bias = {str(i): -100 for i in range(12, 24)}
    with serving(Engine("vllm")) as url:
        server = Server(url, 600.0)
        server.load(weights, "7")
        free, bound = (server.sample([3, 4, 5], 16, 9, 1.0, ENDS, 1, b) for b in ({}, bias))
    assert (
        max(i for ids, _, _ in free for i in ids) >= 12 > max(i for ids, _, _ in bound for i in ids)
    )


HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\n"


def drips(connection):
    connection.sendall(HEAD % 200 + b"Content-Length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b" ")
        time.sleep(0.1)


def drips_headers(connection):
    connection.sendall(HEAD % 200)
    for i in range(1000):
        connection.sendall(b"X-%d: y\r\n" % i)
        time.sleep(0.1)


def card(**fields) -> bytes:
    content = json.dumps({"data": [{"id": "m", "owned_by": "vllm", **fields}]}).encode()
    return HEAD % 200 + b"Content-Length: %d\r\n\r\n" % len(content) + content


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_model_len": "abc"}, "max_model_len 'abc', which is no number of tokens"),
        ({"id": [1]}, "id [1], which is no name of a model"),
    ],
)
def test_a_server_that_describes_itself_with_wrong_types(fields, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(card(**fields))

        threading.Thread(target=serve, daemon=True).start()
        refuses(re.escape(words), Server, f"http://127.0.0.1:{listener.getsockname()[1]}", 600)


@pytest.mark.parametrize(
    "answer, words",
    [
        (drips_headers, "(TimeoutError: the answer does not end; the limit is 0.5 s)"),
        (drips, "(TimeoutError: the answer does not end; the limit is 0.5 s)"),
        (
            lambda c: c.sendall(HEAD % 200 + b"Content-Length: 5000\r\n\r\n" + b" " * 5000),
            "more than 4,096 bytes, which is absurd",
        ),
        (
            lambda c: c.sendall(HEAD % 200 + b"Content-Length: 4000\r\n\r\n" + b"[" * 4000),
            "in another form, RecursionError",
        ),
        (
            lambda c: c.sendall(HEAD % 500 + b"Content-Length: 9\r\n\r\n\033[2Jgone\n"),
            r"status 500: b'\x1b[2Jgone",
        ),
    ],
    ids=["drips_headers", "drips", "large", "nested", "escapes"],
)
def test_an_answer_has_limits(monkeypatch, answer, words):
    """A stranger's server may never end, fill the memory, or write to the terminal."""
    monkeypatch.setattr(http_engine, "ANSWER_LIMIT", 4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.recv(10_000)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        server = Server.__new__(Server)
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.timeout = 600
        if "the limit" in words:
            server.timeout = 0.5
        refuses(re.escape(words), server.call, "/v1/models")
