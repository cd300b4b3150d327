"""Our models for lm-eval (EleutherAI's lm-evaluation-harness, pip install lm-eval): its tasks, its metrics, in any layout.

    from lm_eval import simple_evaluate
    from evaluate import Config
    from rl.lm_eval_model import Nanotitan

    model = Nanotitan(Config(checkpoint="runs/llama3"))
    print(simple_evaluate(model, tasks=["arc_easy", "gsm8k"], limit=100)["results"])

Under torchrun every rank runs these lines: lm-eval gives each of them all requests, and score() and complete() share them out.
Run them from another folder than this one, with this one in PYTHONPATH behind it, where a task needs the package `evaluate`.
"""
import json

try:
    from lm_eval.api.model import LM
except ImportError:
    raise ValueError("rl/lm_eval_model.py needs lm-eval: pip install lm-eval") from None

from rl.scoring import (
    check_requests,
    check_writing,
    complete,
    encode_pair,
    join,
    open_model,
    opening_ids,
    plan_layout,
    read_checkpoint,
    rolling_windows,
    score,
)
from support.chat import read_template, without_marks

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one option


class Nanotitan(LM):
    """cfg: a Config of evaluate.py."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, cfg.kind = cfg, "answer"
        self.text, Model, self.config, self.folder = read_checkpoint(cfg.checkpoint)
        self.text.chat, self.text.tokenizer.encode_special_tokens = None, False  # chat prompts come with their markers in them
        self.longest = self.config.max_seq_len if cfg.seq_len == -1 else cfg.seq_len
        self.layout = plan_layout(cfg, self.config, self.longest)
        join(self.layout, self.config, self.longest)
        self.stages = open_model(cfg.checkpoint, self.layout, Model, self.config)

    def loglikelihood(self, requests):
        pairs = [encode_pair(self.text, *request.args) for request in requests]
        check_requests(pairs, self.longest, self.config.vocab_size)
        return score(self.stages, self.layout, pairs, self.longest)

    def loglikelihood_rolling(self, requests):
        ids = [self.text.ids(request.args[0]) for request in requests]
        windows = [rolling_windows(text, self.text.first, self.longest, self.longest) for text in ids]
        scores = iter(score(self.stages, self.layout, sum(windows, []), self.longest))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests):
        check_writing(self.cfg, self.config)
        found, groups = [""] * len(requests), {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for options, members in groups.items():  # those with the same options together
            options = json.loads(options)
            until, n_new = options.get("until") or [], next((options[name] for name in LENGTHS if name in options), 256)
            if n_new >= self.longest:
                raise ValueError(f"a task asks for {n_new} new tokens, which leaves no room for a prompt in {self.longest}")
            until = [string for string in ([until] if isinstance(until, str) else until) if string]
            temperature = 0.0 if options.get("do_sample") is False else options.get("temperature", 0.0)
            prompts = [opening_ids(self.text, requests[i].args[0])[n_new - self.longest :] for i in members]
            samples = complete(
                self.stages[0], self.layout, self.text, [prompt or [self.text.first] for prompt in prompts], n_new, temperature,
                self.cfg.seed, until, top_k=options.get("top_k", 0), top_p=options.get("top_p", 1.0))
            for i, sample in zip(members, samples):
                found[i] = self.text.tokenizer.decode(sample["ids"])  # without special tokens
                for string in until:
                    found[i] = found[i].split(string)[0]
        return found

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return without_marks(read_template(self.folder).render(chat_history, None, add_generation_prompt))

    @property
    def tokenizer_name(self):
        return self.folder.replace("/", "__")
