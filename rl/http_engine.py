"""--engine http://127.0.0.1:8000: a server of vLLM or SGLang samples for grpo.py. docs/grpo.md, "Another engine", starts one.

    weights   all ranks write a new folder in Hugging Face's format; rank 0 tells the server to read the folder
    prompts   rank 0 sends token ids, for --rollout_rows samples at once; ids and log-probabilities come back
    rewards   on the trainer's ranks, as without a server (rl/rollouts.py)

Answers are checked: the server has the weights of this version (if the server can tell), and each sample is well formed. The
computation is not checked in this file: logprob_k3 of each step compares the server's log-probabilities with the trainer's.
"""
import hashlib
import http.client
import json
import math
import os
import shutil
import tempfile
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from distributed.agree import on_rank_0
from rl.decoding import noise_seed
from rl.environments import draw_task
from rl.rollouts import make_batch, patient_group, sample_groups
from storage.hf import save_hf
from support.config import Need, flag

HTTP = Need("without --engine", lambda c: c.engine)
ANSWER_LIMIT = 1 << 28  # bytes; a batch of samples with log-probabilities has a few million
PAUSES = (1, 2, 4)  # seconds before a refused connection is tried again


@dataclass(kw_only=True)
class EngineConfig:
    engine: str = ""  # vLLM or SGLang at this address samples, e.g. http://127.0.0.1:8000; "" = the processes of this run do
    engine_weights: str = flag("", HTTP)  # folder for weights, with the same path on the server's machine; "" = <out>/engine

    def __post_init__(self):
        if not self.engine:
            return
        url = urlsplit(self.engine)
        if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/"):
            raise ValueError(f"--engine {self.engine} must be an address such as http://127.0.0.1:8000")
        for name, why in (("gen_ranks", "the server samples"), ("batch_invariant", "the server's kernels round as they do")):
            if getattr(self, name):
                raise ValueError(f"--{name} and --engine: {why}; leave one of them out")


# ---------------------------------------------------------------- the server
class Server:
    """One server, in a few calls. Each call raises ValueError with one line."""

    def __init__(self, url: str, timeout_s: float):
        """Ask the server for its kind ("vllm" or "sglang"), the name of its model and its longest sequence."""
        self.url, self.timeout, self.tells, self.refused = url.rstrip("/"), min(timeout_s, 60.0), True, 0
        self.folder, self.version = None, None  # of the weights sent by load()
        card = self.read("/v1/models", lambda answer: dict(answer["data"][0]))
        self.timeout = timeout_s
        self.kind, self.name, self.max_len = card.get("owned_by"), card.get("id"), card.get("max_model_len")
        if self.kind not in ("vllm", "sglang"):
            self.fail(f"/v1/models says owned_by {self.kind!r}; it must be a server of vLLM or SGLang")

    def fail(self, what: str):
        raise ValueError(f"--engine {self.url}: {what}")

    def call(self, path: str, body: dict | None = None, pauses=(), missing=()):
        """The server's JSON answer; GET without a body, else POST. pauses: seconds between attempts to connect. missing: status
        codes of a server without this path; then the answer is None."""
        url = urlsplit(self.url)
        Connection = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        for pause in (*pauses, None):
            try:
                connection = Connection(url.netloc, timeout=self.timeout)
                try:
                    connection.request("GET" if body is None else "POST", path, body is not None and json.dumps(body) or None,
                                       {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    content = self.read_all(answer, connection, path)
                finally:
                    connection.close()
                break
            except ConnectionRefusedError:
                if pause is None:
                    self.fail(f"nothing answers there ({path}: connection refused); start the server, then this run again")
                self.refused += 1
                print(f"--engine {self.url}: connection refused, tried again in {pause} s", flush=True)
                time.sleep(pause)
            except TimeoutError:
                self.fail(f"no answer to {path} within {self.timeout:g} s")
            except (OSError, http.client.HTTPException) as error:
                self.fail(f"the connection broke during {path} ({type(error).__name__}: {error}); the server may have died")
        if answer.status in missing:
            return None
        if answer.status >= 400:
            text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(content.decode(errors="replace").split())[:300])
            self.fail(f"{path} answers with status {answer.status}: {text}")
        try:
            return json.loads(content) if content.strip() else {}
        except (ValueError, RecursionError):
            self.fail(f"{path} answers no JSON but {content[:100]!r}")

    def read_all(self, answer, connection, path: str) -> bytes:
        """The content of an answer, limited in time (--rollout_timeout_s) and bytes: a server might never end."""
        content, deadline = bytearray(), time.monotonic() + self.timeout
        while piece := answer.read1(1 << 20):
            content += piece
            if len(content) > ANSWER_LIMIT:
                self.fail(f"{path} answers with more than {ANSWER_LIMIT:,} bytes, which is absurd")
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            if connection.sock:
                connection.sock.settimeout(left)
        return bytes(content)

    def read(self, path: str, take, body: dict | None = None, pauses=(), hint=""):
        """take(answer), or a ValueError for an answer of another form, with the hint."""
        answer = self.call(path, body, pauses)
        try:
            return take(answer)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            self.fail(f"{path} answers in another form, {type(error).__name__} {error} in {json.dumps(answer)[:200]}{hint}")

    # ------------------------------------------------ weights
    def load(self, folder: str, version: str):
        """Make the server read the weights of this folder, under the name `version`."""
        if self.kind == "sglang":  # SGLang empties its cache of prompts as well
            body = {"model_path": folder, "weight_version": version}
            answer = self.read("/update_weights_from_disk", dict, body, PAUSES)
            if answer.get("success") is not True:
                self.fail(f"it did not read {folder}: {answer.get('message')}")
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            if self.call("/collective_rpc", body, PAUSES, missing=(404,)) is None:
                self.fail("it has no /collective_rpc; start vLLM with VLLM_SERVER_DEV_MODE=1")
            # the cache of prompts was computed with the previous weights
            if self.read("/reset_prefix_cache", lambda answer: dict(answer or {}), {}).get("success") is False:
                self.fail("/reset_prefix_cache did not succeed: other requests run there; the server must be this run's alone")
            if self.tells and self.call("/update_weight_version", {"new_version": version}, missing=(404, 405)) is None:
                self.cannot_tell()
        self.folder, self.version, self.refused = folder, version, 0

    def cannot_tell(self):
        if self.tells:
            print(f"--engine {self.url} cannot tell which weights it has; watch logprob_k3", flush=True)
        self.tells = False

    def check_version(self, there=None):
        """Fail if the server no longer has the weights of load(). there: version in the answer to a prompt, or None."""
        if self.kind == "vllm" and self.tells:
            there = self.read("/weight_info", lambda answer: answer["weight_version"])
        if there is None and self.refused:
            self.fail("it was away for a moment and cannot tell which weights it has now; start this run again")
        if there is None:
            self.cannot_tell()
        if there is not None and there != self.version:
            self.fail(f"it has the weights {there!r} and not {self.version!r}: it was started again, or another run uses it; "
                      "start this run again")

    # ------------------------------------------------ samples
    def sample(self, prompt: list[int], n: int, room: int, temperature: float, ends: list[int], seed: int, bias: dict) -> list:
        """n samples of a prompt, at most `room` ids each: (ids, log-probabilities at the temperature, reason of the end)."""
        common = dict(temperature=temperature, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, stop_token_ids=ends)
        if bias:
            common["logit_bias"] = bias
        if self.kind == "vllm":  # vLLM gives sample i the seed + i
            body = dict(model=self.name, prompt=prompt, n=n, max_tokens=room, seed=seed, logprobs=1, return_token_ids=True)
            hint = "; vLLM before 0.10.2 has no return_token_ids"
            found = self.read("/v1/completions", samples_of_vllm, body | common, PAUSES, hint)
        else:
            each = [dict(common, max_new_tokens=room, sampling_seed=seed + i) for i in range(n)]
            body = dict(input_ids=[prompt] * n, sampling_params=each, return_logprob=True)
            found, versions = self.read("/generate", samples_of_sglang, body, PAUSES)
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
    samples, versions = [], []
    for choice in answer:
        meta = choice["meta_info"]
        logprobs, ids = [[entry[i] for entry in meta["output_token_logprobs"]] for i in (0, 1)]
        samples.append((ids, logprobs, meta["finish_reason"]["type"]))
        versions.append(meta.get("weight_version"))
    return samples, versions


def wrong_sample(ids, logprobs, reason, room: int, ends: list[int], n_vocab: int, greedy: bool) -> str:
    """The fault of a sample from the server, or ""."""
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not 1 <= len(ids) <= room or len(logprobs) != len(ids):
        return f"it must have between 1 and {room} ids, and a log-probability for each"
    if outside := [i for i in ids if type(i) is not int or not 0 <= i < n_vocab]:
        return f"the id {outside[0]} is none of the model's {n_vocab}"
    numbers = [type(x) in (int, float) and math.isfinite(x) for x in logprobs]
    if not greedy and (not all(numbers) or max(logprobs) > 1e-3):
        worst = max(logprobs) if all(numbers) else logprobs[numbers.index(False)]
        return f"{worst} is no log-probability; vLLM needs --logprobs-mode processed_logprobs"
    if set(ids[:-1]) & set(ends):
        return "it goes on behind its end"
    if reason == "stop" and ids[-1] not in ends:
        return f"it ended with the id {ids[-1]}, which is none of {ends}, those that end a text"
    if reason == "length" and ids[-1] not in ends and len(ids) < room:
        return f"it was cut off after {len(ids)} ids, and {room} were asked for: --seq_len is more than the server allows"
    return "" if reason in ("stop", "length") else f"its finish_reason is {reason!r}"


def find_server(cfg, env, rank: int):
    """Check that the server runs and can serve this run. Raises ValueError before anything is built."""
    if hasattr(env, "tool"):
        raise ValueError(f"--engine {cfg.engine}: --env {cfg.env} has a tool, and a server does not stop for its answers; "
                         "leave out --engine")
    if rank == 0:
        server = Server(cfg.engine, cfg.rollout_timeout_s)
        if (server.max_len or cfg.seq_len) < cfg.seq_len:
            server.fail(f"its sequences have at most {server.max_len} tokens, fewer than --seq_len {cfg.seq_len}; start it "
                        f"with --max-model-len (SGLang: --context-length) {cfg.seq_len}")
        if cfg.engine_weights:
            try:
                os.makedirs(cfg.engine_weights, exist_ok=True)
                tempfile.TemporaryFile(dir=cfg.engine_weights).close()
            except OSError as error:
                raise ValueError(f"--engine_weights {cfg.engine_weights}: no folder to write in ({error.strerror})") from None


# ---------------------------------------------------------------- the engine
class HTTPEngine:
    """The engine on a trainer's rank, see rl/engines.py. submit() writes the weights; a thread of rank 0 sends weights and
    prompts to the server, one batch after the other, while the trainer trains. collect() waits for the thread."""

    def __init__(self, trainer, env, text):
        self.trainer, cfg, layout = trainer, trainer.cfg, trainer.layout
        self.cfg, self.text, self.layout, self.task = cfg, text, layout, (cfg, env, text, layout)
        # Rank 0 gives up after --rollout_timeout_s and tells the other ranks why, so the others wait longer.
        self.group = patient_group(dist.group.WORLD, 2 * cfg.rollout_timeout_s) if layout.world_size > 1 else None
        self.folder = os.path.abspath(cfg.engine_weights or f"{cfg.out}/engine")
        self.mine = f"{Path(cfg.out).name}-{hashlib.sha256(os.path.abspath(cfg.out).encode()).hexdigest()[:6]}"
        self.written, self.cursor, self.running, self.ready = None, 0, deque(), deque()
        self.server, self.start = on_rank_0(self.connect, self.group)
        if layout.rank == 0:
            self.one_batch, self.prompts = ThreadPoolExecutor(1), ThreadPoolExecutor(max(1, cfg.rollout_rows // cfg.group_size))

    def connect(self):
        """On rank 0: the server, and a name for this start of the run. Weights of earlier starts are removed."""
        os.makedirs(self.folder, exist_ok=True)
        for path in Path(self.folder).glob(f"{self.mine}-*"):
            shutil.rmtree(path, ignore_errors=True)
        return Server(self.cfg.engine, self.cfg.rollout_timeout_s), uuid.uuid4().hex[:8]

    def write_weights(self) -> str | None:
        """Write the current policy, on all ranks; returns the folder, or None if this version was written before."""
        folder = f"{self.folder}/{self.mine}-{self.start}-{self.trainer.policy_version}"
        if folder == self.written:
            return None
        self.written = folder
        dtype, tokenizer = self.layout.compute_dtype, self.text.file
        save_hf(self.trainer.model, folder, dtype, tokenizer_file=tokenizer, group=self.group, quiet=True)
        return folder

    def submit(self, cursor: int | None):
        cfg, env, text, _ = self.task
        if cfg.dynamic_sampling:
            self.finish()  # the previous batch may need more samples, of the previous weights
        cursor, split = self.cursor if cursor is None else cursor, f"train/{cfg.seed}"
        fits = partial(text.fits, seq_len=cfg.seq_len)
        self.cursor = cursor + cfg.prompts_per_step
        tasks = [(f"{split}/{i}", draw_task(env, split, i, fits)[0]) for i in range(cursor, self.cursor)]
        job = self.request(tasks, cfg.group_size, cfg.temperature)
        self.running.append((cursor, self.trainer.policy_version, job, time.time()))

    def request(self, tasks, group_size: int, temperature: float):
        """Write the current policy, and start a request on rank 0: (tasks, future samples), on other ranks None."""
        folder = self.write_weights()
        if self.layout.rank == 0:
            return tasks, self.one_batch.submit(self.answers, folder, tasks, group_size, temperature)

    def finish(self, n: int | None = None):
        """Wait for n batches (None: all submitted ones) and compute the rewards."""
        for _ in range(len(self.running) if n is None else n):
            cursor, version, job, began = self.running.popleft()
            batch = make_batch(*self.task, None, cursor, version, draw=partial(self.draw, job))
            self.ready.append(batch | {"began": began})
            self.cursor = max(self.cursor, batch["cursor"])

    def collect(self) -> dict:
        self.finish(0 if self.ready else 1)
        return self.ready.popleft()

    def evaluate(self, tasks: list[tuple[str, str]], group_size: int, temperature: float) -> list[dict]:
        self.finish()
        draw = partial(self.draw, self.request(tasks, group_size, temperature))
        return sample_groups(*self.task, None, tasks, group_size, temperature, draw=draw)

    def close(self):
        if self.layout.rank == 0:
            self.one_batch.shutdown()
            self.prompts.shutdown()
            shutil.rmtree(self.written or "", ignore_errors=True)

    # ------------------------------------------------ in the thread of rank 0
    def answers(self, folder: str | None, tasks, group_size: int, temperature: float) -> list[list[dict]]:
        """The samples of these prompts. folder: weights for the server to read first, or None."""
        if folder is not None:
            before = self.server.folder
            self.server.load(folder, os.path.basename(folder))
            shutil.rmtree(before or "", ignore_errors=True)
        until = time.monotonic() + self.server.timeout
        prompts = [(name, self.text.prompt(prompt)) for name, prompt in tasks]
        asked = [self.prompts.submit(self.ask, name, ids, group_size, temperature) for name, ids in prompts]
        try:
            found = [prompt.result(timeout=max(0.0, until - time.monotonic())) for prompt in asked]
        except TimeoutError:
            self.server.fail(f"{len(tasks)} prompts took longer than --rollout_timeout_s {self.server.timeout:g}")
        finally:
            for prompt in asked:  # after a failure, the remaining prompts are not sent
                prompt.cancel()
        if self.server.kind == "vllm":
            self.server.check_version()
        return found

    def ask(self, name: str, prompt: list[int], n: int, temperature: float) -> list[dict]:
        cfg, ends = self.cfg, self.text.ends
        unknown, n_vocab = self.trainer.model.unknown_ids, self.trainer.model.config.vocab_size
        bias = {} if unknown is None else {str(i): -100 for i in unknown.tolist()}  # probability 0
        room = max(1, min(cfg.max_new_tokens, cfg.seq_len - len(prompt)))
        found = self.server.sample(prompt, n, room, temperature, ends, noise_seed(f"{cfg.seed}/{name}"), bias)
        for ids, logprobs, reason in found:
            if wrong := wrong_sample(ids, logprobs, reason, room, ends, n_vocab, temperature == 0):
                self.server.fail(f"a sample of {json.dumps(prompt)[:80]} is wrong: {wrong}; ids {json.dumps(ids)[:80]}")
        return [dict(ids=ids, logprobs=logprobs, mask=[1.0] * len(ids), truncated=ids[-1] not in ends)
                for ids, logprobs, _ in found]

    def draw(self, job, cfg, env, text, layout, model, tasks, mine, group_size, temperature):
        """(2) by the server, in place of rollouts.draw_samples: rank 0 waits for all samples, and each rank takes its share.
        job: the request of rank 0 that is under way; further rounds of --dynamic_sampling have other tasks."""

        def wait():
            if job[0] == tasks:
                return job[1].result()
            return self.one_batch.submit(self.answers, None, tasks, group_size, temperature).result()

        found = on_rank_0(wait, self.group)
        return [sample for i in mine for sample in found[i]], []
