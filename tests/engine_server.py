"""A server for grpo.py --engine with the protocol of vLLM or SGLang, made of the standard library
and our own decoder. Noise comes from the seed of a request, so the samples equal those of grpo.py
in place."""

import json
import random
import threading
from base64 import b64decode
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gloo_nccl
import torch
from safetensors.torch import save_file

from corpus.tokenizer import load_tokenizer
from rl.decoding import rollout
from storage.hf import load_hf_model

ONE_AT_A_TIME = threading.Lock()
OVER_NCCL = (
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


class Engine:
    """State and answers of the server. fault(path, answer) -> answer may spoil any answer, or raise
    to break the connection."""

    def __init__(self, kind: str, fault=None, tells=True, from_hf=None):
        """from_hf: the folder of the first weights, in which those that come over "NCCL" are
        written."""
        self.from_hf, self.kind, self.fault, self.tells = (
            from_hf,
            kind,
            fault or (lambda path, answer: answer),
            tells,
        )
        self.model, self.version, self.folders, self.name = None, "default", [], "policy"

    def read(self, folder: str):
        self.model, self.folders = (
            load_hf_model(folder, dtype=torch.float32)[0],
            [*self.folders, folder],
        )
        self.file = Path(folder, "tokenizer.json")

    def draw(self, prompt, n, room, temperature, ends, seed, bias, stop) -> list[dict]:
        noise = torch.rand(
            (n, room),
            generator=torch.Generator().manual_seed(random.randrange(99) if seed is None else seed),
        )
        if stop:
            tokenizer = load_tokenizer(self.file)
        else:
            tokenizer = None

        def stops(s):
            if stop and stop[0] in tokenizer.decode(s.ids):
                return None
            return []

        with ONE_AT_A_TIME:
            if bias:
                self.model.unknown_ids = torch.tensor([int(i) for i in bias])
            else:
                self.model.unknown_ids = None
            return rollout(
                self.model,
                [prompt],
                noise[None],
                temperature,
                ends,
                max_len=len(prompt) + room,
                reply=stops,
            )

    def answer(self, path: str, body: dict | None):
        """(status, content of the answer)"""
        sglang = self.kind == "sglang"
        if self.from_hf and path == "/get_world_size":
            return 200, {"world_size": 1}
        if body is None and path in (
            ["/update_weights_from_disk"]
            if sglang
            else ["/collective_rpc", "/v1/load_lora_adapter", *OVER_NCCL]
        ):
            return 405, {"detail": "Method Not Allowed"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "owned_by": self.kind, "max_model_len": 64}]}
        if path == "/generate" and sglang:
            first, seeds = (
                body["sampling_params"][0],
                [p["sampling_seed"] for p in body["sampling_params"]],
            )
            assert seeds == [*range(seeds[0], seeds[0] + len(seeds))]
            assert body["return_logprob"]
            samples = self.draw(
                body["input_ids"][0],
                len(seeds),
                first["max_new_tokens"],
                first["temperature"],
                first["stop_token_ids"],
                seeds[0],
                first.get("logit_bias"),
                first.get("stop"),
            )
            return 200, [
                {
                    "text": "",
                    "meta_info": {
                        "finish_reason": {"type": "length" if s.truncated else "stop"},
                        "output_token_logprobs": [[x, i, None] for x, i in zip(s.logprobs, s.ids)],
                        **({"weight_version": self.version} if self.tells else {}),
                    },
                }
                for s in samples
            ]
        if path == "/v1/completions" and not sglang:
            assert body["return_token_ids"]
            assert body["model"] == self.name
            assert (body["top_p"], body["top_k"]) == (1.0, -1)
            samples = self.draw(
                body["prompt"],
                body["n"],
                body["max_tokens"],
                body["temperature"],
                body["stop_token_ids"],
                body.get("seed"),
                body.get("logit_bias"),
                body.get("stop"),
            )
            return 200, {
                "choices": [
                    {
                        "index": i,
                        "text": "",
                        "finish_reason": "length" if s.truncated else "stop",
                        "token_ids": s.ids,
                        "logprobs": {"token_logprobs": s.logprobs},
                    }
                    for i, s in enumerate(samples)
                ][::-1]
            }
        if path == "/update_weights_from_disk" and sglang:
            self.read(body["model_path"])
            self.version = body["weight_version"]
            return 200, {"success": True, "message": "done"}
        if path == "/collective_rpc" and not sglang:
            assert body["method"] == "reload_weights"
            self.read(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/v1/load_lora_adapter" and not sglang:
            self.read(body["lora_path"])  # with the weights that adapter_config.json names
            self.name, before = body["lora_name"], self.name
            if self.name == before:
                return (400, "loaded already")
            return (200, b"Success: no JSON")
        if path == "/v1/unload_lora_adapter" and not sglang:
            if body["lora_name"] != self.name:
                return (200, b"Success: no JSON")
            return (404, "in use")
        if path == "/reset_prefix_cache" and not sglang:
            return 200, None
        if path == "/init_weight_transfer_engine" and not body["init_info"]:
            return 500, "Invalid init_info for NCCLWeightTransferEngine"
        if path == "/init_weight_transfer_engine" and self.from_hf:
            name, rank, ranks = map(
                body["init_info"].get, ("nccl_unique_id_b64", "rank_offset", "world_size")
            )
            self.group = gloo_nccl.group(b64decode(name), rank, ranks)
            self.group.allreduce(torch.zeros(1)).wait()
        if path == "/update_weights" and self.from_hf:
            about, found = body["update_info"], {}
            for name, dtype, shape in zip(
                about["names"], about["dtype_names"], about["shapes"], strict=True
            ):
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(found[name], 0).wait()
            save_file(found, self.from_hf / "model.safetensors")
            self.read(self.from_hf)
        if self.from_hf and path in OVER_NCCL:
            return 200, None
        if path == "/update_weight_version" and self.tells and not sglang:
            self.version = body["new_version"]
            return 200, {"success": True}
        if path == "/weight_info" and self.tells and not sglang:
            return 200, {"weight_version": self.version}
        return 404, {"detail": "Not Found"}


@contextmanager
def serving(engine: Engine, port=0):
    """Serve, and yield the address. port: 0 = a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self, body=None):
            try:
                status, answer = engine.answer(self.path, body)
                answer = engine.fault(self.path, answer)
            except ConnectionAbortedError:
                return self.connection.close()
            if isinstance(answer, bytes):
                content = answer
            elif answer is None:
                content = b""
            else:
                content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client has given up
                self.wfile.write(content)

        def do_POST(self):
            self.do_GET(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *args):
            pass

    ThreadingHTTPServer.request_queue_size = 512  # as many connections may begin at once
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
