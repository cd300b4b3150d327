"""rl/lm_eval_model.py against lm-eval's own model of transformers, on tasks that lie beside each other on the disk.

lm-eval brings 50 packages of 600 MB with it, so no requirements file asks for it: pip install 'lm-eval[hf]', then these run.
"""
import json
import os
import random

import pytest
import torch.distributed as dist
from policy import hf_folder

for package in ("lm_eval", "accelerate"):
    pytest.importorskip(package, reason="lm-eval is not installed: pip install 'lm-eval[hf]'")

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
num_fewshot: 1
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "endings": """
output_type: loglikelihood
doc_to_text: ""
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}} "
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["1", "on"], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
""",
}
WORDS = "Sum the digits of 123 4 naïve 東京 don't a , .".split()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A TaskManager that knows TASKS, with one file of data."""
    from lm_eval.tasks import TaskManager

    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(1)
    text = lambda n: " ".join(rng.choices(WORDS, k=rng.randint(1, n)))  # noqa: E731
    records = [dict(question=text(90 if i % 9 == 0 else 9), choices=[text(4) for _ in range(3)], answer=i % 3)
               for i in range(30)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, body in TASKS.items():
        head = f"task: {name}\ntest_split: test\ndataset_path: json\n"
        head += f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(head + body)
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_the_same_results_as_lm_evals_own_model(kind, tasks, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from rl.lm_eval_model import Nanotitan, ScoringConfig

    hf_folder(tmp_path, kind, std=0.3)
    if dist.is_initialized():
        dist.destroy_process_group()
    ours = Nanotitan(ScoringConfig(checkpoint=str(tmp_path), device="cpu", local_batch_size=4))
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=1, dtype="float32")
    got, want = (simple_evaluate(model, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0, log_samples=True)
                 for model in (ours, theirs))
    for name in TASKS:
        for metric, value in want["results"][name].items():
            same = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert got["results"][name][metric] == same, (name, metric)
        for a, b in zip(got["samples"][name], want["samples"][name], strict=True):
            assert a["doc_id"] == b["doc_id"] and repr(a["arguments"]) == repr(b["arguments"])
            for x, y in zip(flat(a["resps"]), flat(b["resps"]), strict=True):
                assert x == (y if isinstance(y, str) else pytest.approx(float(y), abs=1e-4)), name


def flat(value):
    return [x for part in value for x in flat(part)] if isinstance(value, list | tuple) else [value]
