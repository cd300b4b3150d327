"""--engine http://127.0.0.1:8000: a server of vLLM or SGLang samples for grpo.py. docs/grpo.md,
"Another engine", starts one.

    weights   all ranks write a new folder in Hugging Face's format, with --engine_adapters a small one in peft's; rank 0 tells
              the server to read the folder. --engine_weights nccl sends them over NCCL instead, see rl/nccl_engine.py
    prompts   rank 0 sends token ids, for --rollout_rows samples at once; ids and log-probabilities come back
    rewards   on rank 0, in the thread that waits for the server, while the trainer trains (rl/rollouts.py)

Answers are checked: the server has the weights of this version (if the server can tell), and each
sample is well formed. logprob_k3 of each step checks the computation: the server's
log-probabilities against the trainer's.
"""

import contextlib
import hashlib
import http.client
import json
import math
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from distributed.agree import on_rank_0
from distributed.layout import Layout
from rl.decoding import noise_seed
from rl.environments import Turns
from rl.policy import list_weights, pack_weights
from rl.rollouts import Remote
from rl.sample import Sample
from storage.hf import save_hf

ANSWER_LIMIT = 1 << 28  # bytes; a batch of samples with log-probabilities has a few million


def cut(connection: socket.socket) -> None:
    """End a connection from another thread: whoever reads from it reads its end."""
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- the server
class Server:
    """One server, in a few calls. Each call raises ValueError with one line."""

    def __init__(self, url: str, timeout_s: float, adapters=False):
        """Ask the server for its kind ("vllm" or "sglang"), the name of its model and its longest
        sequence. adapters: load() gets folders of adapters."""
        if "://" in url:
            self.url = url
        else:
            self.url = f"http://{url}"
        self.timeout = min(timeout_s, 60.0)
        self.version = None
        card = self.call("/v1/models", take=lambda answer: dict(answer["data"][0]))
        self.kind = card.get("owned_by")
        self.name = card.get("id")
        self.max_len = card.get("max_model_len")
        if not isinstance(self.name, str):
            self.fail(f"/v1/models says id {self.name!r}, which is no name of a model")
        if self.max_len is not None and type(self.max_len) is not int:
            self.fail(
                f"/v1/models says max_model_len {self.max_len!r}, which is no number of tokens"
            )
        if self.kind not in ("vllm", "sglang"):
            self.fail(
                f"/v1/models says owned_by {self.kind!r}; it must be a server of vLLM or SGLang"
            )
        self.adapters = adapters
        if adapters and self.kind != "vllm":
            self.fail(
                f"--engine_adapters is for vLLM, and this is {self.kind}; leave it out, and all "
                "weights are sent, merged"
            )
        # the path for new weights, and how a server gets the path
        self.takes = "/update_weights_from_disk"
        how = ""
        if adapters:
            self.takes = "/v1/load_lora_adapter"
            how = "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
        elif self.kind == "vllm":
            self.takes = "/collective_rpc"
            how = "; start vLLM with VLLM_SERVER_DEV_MODE=1"
        if self.call(self.takes, optional=True) is None:
            self.fail(f"it does not know {self.takes}{how}")
        # SGLang names the version of its weights with each sample, a new vLLM at this address
        self.tells = (
            self.kind == "vllm"
            and not adapters
            and self.call("/weight_info", optional=True) is not None
        )
        self.timeout = timeout_s

    def fail(self, what: str):
        raise ValueError(f"--engine {self.url}: {what}")

    def call(self, path: str, body: dict | None = None, take=lambda answer: answer, optional=False):
        """take(the server's JSON answer), None without content; GET without a body, else POST. take
        None: any answer will do.
        optional: return None if the server does not know the path, {} if it takes no GET there."""
        url = urlsplit(self.url)
        method = "GET"
        content = None
        if body is not None:
            method = "POST"
            content = json.dumps(body)
        if url.scheme == "https":
            Connection = http.client.HTTPSConnection
        else:
            Connection = http.client.HTTPConnection
        try:
            with contextlib.closing(Connection(url.netloc, timeout=self.timeout)) as connection:
                answer, content = self.exchange(connection, method, path, content)
        except (OSError, http.client.HTTPException) as error:
            self.fail(
                f"no answer to {path} ({type(error).__name__}: {error}; the limit is "
                f"{self.timeout:g} s); if the server "
                "does not run, start it, then this run again"
            )
        if optional and answer.status in (404, 405):
            if answer.status == 404:
                return None
            return {}
        if answer.status >= 400:
            self.fail(f"{path} answers with status {answer.status}: {content[:300]!r}")
        try:
            if take is None:
                return None
            if content.strip():
                return take(json.loads(content))
            return take(None)
        except (
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            ValueError,
            RecursionError,
        ) as error:
            self.fail(
                f"{path} answers in another form, {type(error).__name__} {error} in "
                f"{content[:200]!r}"
            )

    def exchange(self, connection, method: str, path: str, content) -> tuple:
        """Send a request; returns the answer and its content. One deadline for all of it: the
        socket's own timeout begins again with each byte that a server drips."""
        until = time.monotonic() + self.timeout
        connection.connect()
        deadline = threading.Timer(until - time.monotonic(), cut, [connection.sock])
        deadline.daemon = True
        deadline.start()
        try:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = self.read_all(answer, path, until)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= until:
                raise TimeoutError("the answer does not end") from None
            raise
        finally:
            deadline.cancel()
        if time.monotonic() >= until:  # what came may be cut off
            raise TimeoutError("the answer does not end")
        return answer, content

    def read_all(self, answer, path: str, until: float) -> bytes:
        """The content of an answer, limited in time and bytes: a server might never end."""
        content = bytearray()
        while piece := answer.read1(1 << 20):
            content += piece
            if len(content) > ANSWER_LIMIT:
                self.fail(f"{path} answers with more than {ANSWER_LIMIT:,} bytes, which is absurd")
            if time.monotonic() > until:
                raise TimeoutError("the answer does not end")
        return bytes(content)

    def load(self, folder: str, version: str):
        """Make the server read the weights of this folder, under the name `version`."""
        # a request names them, so neither a sample nor a cached prompt can be of another version
        if self.adapters:
            self.call(self.takes, {"lora_name": version, "lora_path": folder}, None)
            if self.version:
                self.call("/v1/unload_lora_adapter", {"lora_name": self.version}, None)
            self.name = self.version = version
        elif self.kind == "sglang":  # SGLang empties its cache of prompts as well
            answer = self.call(self.takes, {"model_path": folder, "weight_version": version}, dict)
            if answer.get("success") is not True:
                self.fail(f"it did not read {folder}: {answer.get('message')}")
            self.version = version
        else:
            self.call(self.takes, {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            self.commit(version)

    def commit(self, version: str):
        """vLLM has new weights: empty its cache of prompts, computed with the weights before, and
        name the version."""
        answer = self.call("/reset_prefix_cache", {}, lambda answer: dict(answer or {}))
        if answer.get("success") is False:
            self.fail(
                "/reset_prefix_cache did not succeed: other requests run there; the server must "
                "be this run's alone"
            )
        if self.tells:
            self.call("/update_weight_version", {"new_version": version})
        self.version = version

    def check_version(self, there=None):
        """Fail if the server no longer has the weights of load(). there: the version named with a
        sample, None if unknown."""
        if self.tells:
            there = self.call("/weight_info", take=lambda answer: answer["weight_version"])
        if there not in (None, self.version):
            self.fail(
                f"it has the weights {there!r} and not {self.version!r}: it was started again, or "
                "another run uses it; "
                "start this run again"
            )

    def sample(
        self,
        prompt: list[int],
        n: int,
        room: int,
        temperature: float,
        ends: list[int],
        seed: int | None,
        bias: dict,
        stop="",
    ) -> list:
        """n samples of a prompt, at most `room` ids each: (ids, log-probabilities at the
        temperature, reason of the end). seed: None lets the server choose. stop: a sample also ends
        with the token that completes this text."""
        common = dict(
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            stop_token_ids=ends,
        )
        if bias:
            common["logit_bias"] = bias
        if stop:
            common["stop"] = [stop]
        if self.kind == "vllm":  # vLLM gives sample i the seed + i
            body = dict(
                model=self.name,
                prompt=prompt,
                n=n,
                max_tokens=room,
                logprobs=1,
                return_token_ids=True,
            )
            if seed is not None:
                body["seed"] = seed
            found = self.call("/v1/completions", body | common, samples_of_vllm)
        else:
            each = [dict(common, max_new_tokens=room) for _ in range(n)]
            if seed is not None:
                for i, parameters in enumerate(each):
                    parameters["sampling_seed"] = seed + i
            body = dict(input_ids=[prompt] * n, sampling_params=each, return_logprob=True)
            found, versions = self.call("/generate", body, samples_of_sglang)
            for version in versions:
                self.check_version(version)
        if len(found) != n:
            self.fail(f"{len(found)} samples came back where {n} were asked for")
        return found


def samples_of_vllm(answer: dict) -> list[tuple]:
    """(ids, log-probabilities, reason of the end) of each sample."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in choices]


def samples_of_sglang(answer: list) -> tuple[list[tuple], list]:
    """The same, and the version of the weights of each sample, or None."""
    samples = []
    versions = []
    for choice in answer:
        meta = choice["meta_info"]
        tokens = meta["output_token_logprobs"]
        logprobs = [token[0] for token in tokens]
        ids = [token[1] for token in tokens]
        samples.append((ids, logprobs, meta["finish_reason"]["type"]))
        versions.append(meta.get("weight_version"))
    return samples, versions


def wrong_sample(
    ids: Any,
    logprobs: Any,
    reason: Any,
    room: int,
    ends: list[int],
    n_vocab: int,
    greedy: bool,
    is_turn: Callable[[list[int]], Any] = lambda ids: 0,
) -> str:
    """The fault of a server's sample, or "". is_turn(ids): whether the ids end a turn, which ends a
    sample as well."""
    if (
        not isinstance(ids, list)
        or not isinstance(logprobs, list)
        or not 1 <= len(ids) <= room
        or len(logprobs) != len(ids)
    ):
        return f"it must have between 1 and {room} ids, and a log-probability for each"
    outside = [i for i in ids if type(i) is not int or not 0 <= i < n_vocab]
    if outside:
        return f"the id {outside[:1]} is none of the model's {n_vocab}"
    for x in logprobs:
        is_logprob = type(x) in (int, float) and -math.inf < x <= 1e-3
        if not greedy and not is_logprob:
            return f"{[x]} is no log-probability; vLLM needs --logprobs-mode processed_logprobs"
    is_cut = reason == "length" and len(ids) == room
    if (
        set(ids[:-1]) & set(ends)
        or reason not in ("stop", "length")
        or not (ids[-1] in ends or is_cut or is_turn(ids))
    ):
        return (
            f"its finish_reason is {reason!r} after {len(ids)} of {room} ids, the last {ids[-1]}; "
            "only the last may be one "
            f"of {ends}, its ends, and --seq_len must not be more than the server allows"
        )
    return ""


def check_server(cfg: Any) -> None:
    """Check that the server runs and can serve this run. Raises ValueError before anything is
    built."""
    server = Server(cfg.engine, cfg.rollout_timeout_s, cfg.engine_adapters)
    if (server.max_len or cfg.seq_len) < cfg.seq_len:
        server.fail(
            f"its sequences have at most {server.max_len} tokens; start it with --max-model-len "
            "(SGLang: "
            f"--context-length) {cfg.seq_len}, which is --seq_len"
        )


# ---------------------------------------------------------------- the engine
class HTTPEngine(Remote):
    """The engine on a trainer's rank, see rl/engines.py. The thread of rank 0 sends weights and
    prompts to the server and pays rewards."""

    def __init__(self, trainer, env, text, cursor: int):
        cfg = trainer.cfg
        self.text = text
        self.cfg = cfg
        # Rank 0 gives up after --rollout_timeout_s and tells the other ranks why, so the others
        # wait longer.
        super().__init__(trainer, cursor, 2 * cfg.rollout_timeout_s)
        self.task = (cfg, env, text, Layout(), None)  # one process draws all samples
        self.folder = os.path.abspath(cfg.engine_weights or f"{cfg.out}/engine")
        self.mine = f"{Path(cfg.out).name}-{hashlib.sha256(os.path.abspath(cfg.out).encode()).hexdigest()[:6]}"
        self.written = None
        self.loaded = ""
        self.server, self.start = on_rank_0(self.connect, self.group)
        at_once = cfg.rollout_rows  # requests
        if not Turns(env, text, []).reply:
            at_once //= cfg.group_size
        self.requests = ThreadPoolExecutor(max(1, at_once))

    def connect(self):
        """On rank 0: the server, and a name for this start of the run. Weights of earlier starts
        are removed."""
        os.makedirs(self.folder, exist_ok=True)
        for path in Path(self.folder).glob(f"{self.mine}-*"):
            shutil.rmtree(path, ignore_errors=True)
        server = Server(self.cfg.engine, self.cfg.rollout_timeout_s, self.cfg.engine_adapters)
        if server.kind == "vllm" and not server.tells and not server.adapters:
            print(
                f"--engine {server.url} cannot tell which weights it has; watch logprob_k3",
                flush=True,
            )
        if server.kind == "vllm" and not self.cfg.engine_seed:
            print(
                "vLLM draws without seeds, so the same command draws other samples; --engine_seed "
                "is slower",
                flush=True,
            )
        return server, uuid.uuid4().hex[:8]

    def weights(self) -> str:
        """Write the current policy into a new folder, on all ranks; returns the folder."""
        cfg = self.cfg
        model = self.trainer.model
        layout = self.trainer.layout
        self.written = folder = (
            f"{self.folder}/{self.mine}-{self.start}-{self.trainer.policy_version}"
        )
        if cfg.engine_adapters:
            from storage.peft import write_peft

            adapters = pack_weights(
                list_weights(model, torch.float32, adapters_only=True), layout, self.group
            )
            shape = (cfg.lora_rank, cfg.lora_alpha)
            write = partial(write_peft, folder, adapters, *shape, model, cfg.init_from, {})
            on_rank_0(write, self.group)
        else:
            save_hf(
                model,
                folder,
                layout.compute_dtype,
                tokenizer_file=self.text.file,
                group=self.group,
                quiet=True,
            )
        return folder

    def close(self):
        self.thread.shutdown()
        self.requests.shutdown()
        shutil.rmtree(self.written or "", ignore_errors=True)

    # ------------------------------------------------ in the thread of rank 0
    def run(self, folder: str | None, work, *args):
        """After the server has read the weights of a new folder; those before are removed."""
        if folder:
            self.server.load(folder, os.path.basename(folder))
            shutil.rmtree(self.loaded, ignore_errors=True)
            self.loaded = folder
        return work(*self.task, *args, draw=self.draw)

    def draw(
        self,
        cfg,
        env,
        text,
        layout,
        model,
        tasks,
        prompts,
        group_size: int,
        temperature: float,
        ended,
    ):
        """(2) by the server, in place of rollouts.draw_samples: a request for each prompt, or for
        each turn of each sample."""
        of_samples = []
        for _, task, _ in tasks:
            of_samples += [task] * group_size
        turns = Turns(env, text, of_samples, cfg.reward_threads, cfg.reward_timeout_s)
        asks = []
        for (name, *_), prompt in zip(tasks, prompts):
            if not turns.reply:
                asks.append(partial(self.ask, name, prompt, group_size, temperature))
                continue
            for g in range(group_size):
                i = len(asks)
                asks.append(partial(self.play, turns, i, f"{name}/{g}", prompt, temperature))
        found = []
        try:
            for some in self.requests.map(lambda ask: ask(), asks, timeout=self.server.timeout):
                for s in some:
                    ended(len(found), s.ids, s.truncated)
                    found.append(s)
        except TimeoutError:
            self.server.fail(
                f"{len(tasks)} prompts took longer than --rollout_timeout_s {self.server.timeout:g}"
            )
        self.server.check_version()
        return turns.close(found), turns.failed

    def ask(
        self,
        name: str,
        prompt: list[int],
        n: int,
        temperature: float,
        begun=0,
        stop="",
        is_turn=lambda ids: False,
    ):
        """n samples of a prompt. begun: ids at the end of the prompt that belong to the sample."""
        cfg = self.cfg
        ends = self.text.ends
        unknown = self.trainer.model.unknown_ids
        n_vocab = self.trainer.model.config.vocab_size
        # probability 0
        if unknown is None:
            bias = {}
        else:
            bias = {str(i): -100 for i in unknown.tolist()}
        room = max(1, min(cfg.max_new_tokens - begun, cfg.seq_len - len(prompt)))
        seed = None
        if cfg.engine_seed or self.server.kind == "sglang":
            seed = noise_seed(f"{cfg.seed}/{name}")
        found = self.server.sample(prompt, n, room, temperature, ends, seed, bias, stop)
        for ids, logprobs, reason in found:
            wrong = wrong_sample(
                ids, logprobs, reason, room, ends, n_vocab, temperature == 0, is_turn
            )
            if wrong:
                self.server.fail(
                    f"a sample of {json.dumps(prompt)[:80]} is wrong: {wrong}; ids "
                    f"{json.dumps(ids)[:80]}"
                )
        samples = []
        for ids, logprobs, _ in found:
            mask = [1.0] * len(ids)
            truncated = ids[-1] not in ends
            samples.append(Sample(ids=ids, logprobs=logprobs, mask=mask, truncated=truncated))
        return samples

    def play(
        self, turns: Turns, i: int, name: str, prompt: list[int], temperature: float
    ) -> list[Sample]:
        """Sample i, turn by turn: the server stops at the end of a turn, and the next request goes
        on behind the reply."""
        s = Sample(index=i, prompt=prompt)
        done = False
        room = max(1, min(self.cfg.max_new_tokens, self.cfg.seq_len - len(prompt)))
        while not done and len(s.ids) < room:
            n = len(s.ids)
            (turn,) = self.ask(
                f"{name}/{n}",
                prompt + s.ids,
                1,
                temperature,
                n,
                turns.end,
                lambda ids, s=s: turns.is_over(replace(s, ids=s.ids + ids)),
            )
            s.ids = s.ids + turn.ids
            s.logprobs = s.logprobs + turn.logprobs
            s.mask = s.mask + turn.mask
            later = turns.reply(s)
            said = []
            if later:
                said = later.result()
            done = said is None or s.ids[-1] in self.text.ends and not said
            said = (said or [])[: room - len(s.ids)]
            s.ids = s.ids + said
            s.logprobs = s.logprobs + [0.0] * len(said)
            s.mask = s.mask + [0.0] * len(said)
            if said:
                s.begin = len(s.ids)
        s.truncated = not done
        return [s]
