"""Our models for lm-eval (EleutherAI's lm-evaluation-harness, pip install lm-eval): its tasks and its metrics, in any layout.

    import sys
    sys.path.append("FOLDER_OF_THIS_PROJECT")  # behind the packages: tasks of lm-eval import one that is called evaluate
    from lm_eval import simple_evaluate
    from rl.lm_eval_model import Nanotitan, ScoringConfig

    model = Nanotitan(ScoringConfig(checkpoint="runs/llama3"))
    print(simple_evaluate(model, tasks=["arc_easy", "gsm8k"], limit=100)["results"])

Under torchrun every rank runs these lines: lm-eval gives all requests to each of them, and score() and complete() share them
out. Results are those of lm-eval's own `hf` model; where a tokenizer begins texts, loglikelihood_rolling scores its token, too.
"""
import json
from itertools import chain

try:
    from lm_eval.api.model import LM
except ImportError:
    raise ValueError("rl/lm_eval_model.py needs lm-eval: pip install lm-eval") from None

from rl.scoring import (
    ScoringConfig,
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
    def __init__(self, cfg: ScoringConfig, seed=0):
        super().__init__()
        self.cfg, self.seed, cfg.kind = cfg, seed, "answer"
        self.text, Model, self.config, self.folder = read_checkpoint(cfg.checkpoint)
        self.text.tokenizer.encode_special_tokens = False  # chat prompts come with their markers in them
        self.longest = self.config.max_seq_len if cfg.seq_len == -1 else cfg.seq_len
        self.layout = plan_layout(cfg, self.config, self.longest)
        join(self.layout, self.config, self.longest)
        self.stages = open_model(cfg.checkpoint, self.layout, Model, self.config)

    def loglikelihood(self, requests):
        pairs = [encode_pair(self.text, *request.args) for request in requests]
        self.tell_cut(check_requests(pairs, self.longest + 1, self.config.vocab_size))
        return score(self.stages, self.layout, pairs, self.longest)

    def loglikelihood_rolling(self, requests):
        ids = [opening_ids(self.text, request.args[0]) for request in requests]
        windows = [rolling_windows(text, self.text.first, self.longest, self.longest) for text in ids]
        scores = iter(score(self.stages, self.layout, [*chain(*windows)], self.longest))
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
            prompts = [opening_ids(self.text, requests[i].args[0]) or [self.text.first] for i in members]
            self.tell_cut(check_requests([(prompt, []) for prompt in prompts], self.longest - n_new, self.config.vocab_size))
            prompts = [prompt[n_new - self.longest :] for prompt in prompts]
            samples = complete(
                self.stages[0], self.layout, self.text, prompts, n_new, temperature, self.seed, until,
                top_k=options.get("top_k", 0), top_p=options.get("top_p", 1.0))
            for i, sample in zip(members, samples):
                found[i] = self.text.tokenizer.decode(sample["ids"])  # without special tokens
                for string in until:
                    found[i] = found[i].split(string)[0]
        return found

    def tell_cut(self, n: int):
        if n and self.layout.rank == 0:
            print(f"{n:,} prompts do not fit into {self.longest:,} tokens: they lose their beginnings", flush=True)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return without_marks(read_template(self.folder).render(chat_history, None, add_generation_prompt))

    @property
    def tokenizer_name(self):
        return self.folder.replace("/", "__")
