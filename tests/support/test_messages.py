"""What a wrong command line is told: one line of stderr and status 2, before anything is computed or written.

A row: what is typed, and a regular expression that the line must match. All programs run in this process, in a folder with a
text, token shards and a tokenizer; what a layout cannot do is in test_refusals.py, what a file may hold beside its reader.
"""
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data import DataConfig, open_data
from distributed import launch

REPO = Path(__file__).parents[2]
TINY = "--model_args n_layers=1,dim=8,ffn_dim=8 --steps 2 --device cpu --out run"
BASE = {"train_llama3": TINY, "train_qwen3": "--out run", "train_deepseek": "--out run", "grpo": "--out run"}
TABLE = {
    "train_llama3": r"""
        --stpes 5 => unknown flag --stpes; did you mean --steps\? --help lists all flags$
        -steps 3 => unknown flag -steps; did you mean --steps\?
        --learning_rate 1 => did you mean --lr\?
        --local-batch-size 3 => unknown flag --local-batch-size; did you mean --local_batch_size\?
        --no-compil => did you mean --no-compile\?
        --folders x => unknown flag --folders; --help lists all flags$
        5 => unexpected argument '5'.*--help
        config.json => unexpected argument 'config.json'; flags are written --name value, see --help
        --compile 5 => --compile '5'.*true\|false
        --steps => --steps
        --steps 1.5 => --steps '1.5'.*integer
        --steps 1e99 => below 2\*\*63
        --steps -1 => --steps -1 must be 0 or more
        --load_step -2 => --load_step -2 must be -1 or more
        --lr nan => --lr 'nan'.*number
        --flavor 2B => --flavor '2B'.*debug\|1B
        --save_every 5 => did you mean --checkpoint_every\?
        --parallelism.tensor_parallel_degree 2 => --tp
        --batch_size 5 => did you mean --local_batch_size\? It is what one data rank runs at once; --global_batch_size
        --resume => the same --out continues where it stopped; --help
        --n_layer 3 => --model_args n_layers=4,dim=512
        --beta2 1 => --beta1 0.9 and --beta2 1.0 must be below 1
        --val_batches 0 => --val_batches 0
        --profile 3-2 => --profile '3-2' must be
        --profile 0 => --profile '0' must be
        --tp 2 --model_args dim=8 => or start 2 processes: torchrun --nproc_per_node 2 \S+ .*--model_args dim=8
        --machine B200 => --machine B200 has no effect without --dry_run
        --ac_every 3 --export_dtype float16 => --export_dtype float16 .*--ac_every 3 has
        --no-init_model_only => --no-init_model_only has no effect without --init_from
        --exclude_from_loading head => --exclude_from_loading head has no effect without --init_from or a ch
        --load_only --keep_latest_k 2 --checkpoint_async thread => async thread, --keep_latest_k 2 have no effect with
        --optimizer adamw_sr => --optimizer adamw_sr needs --param_dtype bfloat16, not float32
        --optimizer adamw_8bit --param_dtype bfloat16 => --optimizer adamw_8bit needs --param_dtype float32, not bfloat16
        --ep 2 => unknown flag --ep; .*experts
        --memory_snapshot => --memory_snapshot has no effect without a GPU
        --data shards --cache_dir x => --cache_dir x has no effect with --data of token shards
        --text_column x => unknown flag --text_column; --data reads .* prepare .*--text_column NAME .*, then --data FOLDER
        --data other.jsonl => line 1: need .*KeyError.*data.py prepare --input other.jsonl --text_column NAME .*--data FOLDER$
        --data shards --model_args vocab_size=100 => has (\d+) ids.*use --model_args vocab_size=\1
        --data empty.txt => empty.txt is empty; give a file with text in it
        --data folder => no index.json.*python data.py prepare
        --data one.jsonl => one.jsonl has no validation text; use --val_every 0
        --data table.csv => make a .jsonl of it, python -c 'import csv, json, sys;
        --data list.json => make a .jsonl of it, python -c 'import json, sys;
        --data org/corpus => hf download org/corpus --repo-type dataset --local-dir corpus
        --data web=a:0.5,code=b => --data.*'code=b' lacks a name, a path or a weight.*name=path:weight
        --data web=:0.5 => 'web=:0.5' lacks
        --data web=a:1,b:1 => 'b:1' lacks
        --data web=a:1,code=b:0 => 'code=b:0' lacks .*above 0
        --data web=a:1,web=b:1 => two parts web
        --data web=a:0.3333333,code=b:0.6666667 => after 10,000,000 sequences; round the weights
        --init_from gpt2 => hf download gpt2 --local-dir gpt2
        --init_from meta-llama/Llama-3.2-1B => hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B
        --init_from runs/gone => ^error: (?!.*hf download).*runs/gone
        --init_from ./gpt2 => ^error: (?!.*hf download).*gpt2
        --data book.txt --tokenizer list.json => list.json: not a tokenizer.json
        --data book.txt --seq_len 0 => --seq_len 0
        --data book.txt --cache_dir book.txt => --cache_dir .*book.txt writable
        --out s3://bucket/run => --out s3://bucket/run: only folders are written
        --export_hf gs://bucket/model => to export to gs://bucket/model: only folders are written
        --after_save rsync => --after_save 'rsync' must have \{\} where the checkpoint's folder goes
    """,
    "train_qwen3": r"""
        --moe_balance aux --moe_aux_coef 1 --moe_bias_rate 1 => --moe_balance aux, --moe_bias_rate 1.0, --moe_aux_coef 1.0 have
        --moe_force_balance --ep 2 => --moe_force_balance, --ep 2 have no effect|--ep 2, --moe_force_balance have no effect
        --flavor debug_moe --moe_aux_coef 1 => --moe_aux_coef 1.0 has no effect without --moe_balance aux
        --flavor debug_moe --moe_balance aux --moe_bias_rate 1 => --moe_bias_rate 1.0 .*--moe_balance bias
    """,
    "train_deepseek": r"""
        --moe_balance none --moe_aux_coef 1 => --moe_aux_coef 1.0 has no effect with --moe_balance none
        --mtp_weight 1 => --mtp_weight 1.0 has no effect without mtp_depth 1
        --model_args n_groups=3 => n_experts 8 in n_groups 3 makes no whole groups
        --model_args n_groups=8 => n_groups 8 makes no whole groups, of 2 or more with score_func sigmoid
        --model_args top_k=5 => top_k 5 must be between 1 and the 4 experts of top_k_groups 2 of n_groups 4
        --model_args mtp_depth=2 => mtp_depth 2 0 or 1
        --model_args qk_rope_head_dim=15 => qk_rope_head_dim 15 is odd
        --model_args n_dense_layers=6 => n_dense_layers 6 must be between 0 and n_layers - 1 = 5
        --model_args kv_lora_rank=0 => kv_lora_rank 0 must be at least 1
        --model_args score_func=tanh => score_func
    """,
    "grpo": r"""
        --load_only => --load_only: grpo.py writes no checkpoint with --checkpoint_every 0
        --exclude_from_loading optimizer => --exclude_from_loading optimizer: a policy needs all of its weights
        --pp 2 => a new token needs all layers
        --pp_schedule GPipe => unknown flag --pp_schedule
        --env gsm8k => needs --env_data
        --env_data a.jsonl => --env_data a.jsonl has no effect without --env dataset or --env gsm8k
        --gen_ranks 1 => must leave a process to train
        --batch_invariant --engine http://127.0.0.1:1 => --batch_invariant has no effect with --engine
        --prompts_per_step 4 --minibatches 3 => does not divide --prompts_per_step 4
        --temperature 0 => must be above 0
        --group_size 1 => --group_size 1: an advantage is a reward compared with others
        --max_new_tokens 256 --seq_len 256 => --max_new_tokens 256 leaves no room for a prompt in --seq_len 256
        --beta1 1 => --beta1 1.0 and --beta2 0.95 must be below 1
        --seq_len 16 --max_new_tokens 8 --pack_tokens 8 => no room for a sample of --seq_len 16; use --pack_tokens 16 or more
        --seq_len 16 --max_new_tokens 8 --pack_tokens 18 --cp 2 => not a multiple of 4, the pieces into which --tp 1 and --cp 2
        --pack_tokens 256 --local_batch_size 8 => --local_batch_size 8 has no effect with --pack_tokens
        --pack_tokens 256 --batch_invariant => --batch_invariant: --compile, --pack_tokens, --tp and --cp round otherwise
        --compile => --compile needs --pack_tokens: packed sequences have one length
        --float8 rowwise => unknown flag --float8
        --no-loss_parallel => --no-loss_parallel.*leave it out
        --flavor debug_moe --batch_invariant => --batch_invariant has no effect with experts
        --out s3:/bucket/run => --out s3:/bucket/run: only folders are written
    """,
    "generate": r"""
        --promt x => unknown flag --promt; did you mean --prompt\?
        --prompt => --prompt
        --device cuda => --device cuda: torch finds no GPU
        --prompt x runs/x => unexpected argument 'runs/x'; did you mean --checkpoint runs/x
        --checkpoint runs/gone => runs/gone is no folder; give a run folder, or one of its folders checkpoints/step-N$
        --checkpoint Qwen/Qwen3-0.6B => must be on the disk first: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B
        --checkpoint . => \. holds no checkpoint; give a run folder
    """,
    "data": r"""
         => required
        what => what
        check => DIR
        prepare --inpu book.txt --tokenizer t.json --out out => --input
        prepare --input none.txt --tokenizer t.json --out out => none.txt
        prepare --input t.json --tokenizer t.json --out out => .jsonl
        prepare --input book.txt --tokenizer nowhere --out out => --tokenizer nowhere
        prepare --input book.txt --tokenizer t.json --out out --eot <no> => <no>
        prepare --input book.txt --tokenizer t.json --out book.txt => book.txt
        prepare --input book.txt --tokenizer t.json --out out --workers x => --workers
        prepare --input a.txt.gz --tokenizer t.json --out out => a.txt.gz is truncated
        prepare --input book.txt --tokenizer t.json --out s3://bucket/tokens => --out s3:/bucket/tokens: only folders
        tokenizer --input a.txt.gz --out b.json => a.txt.gz is truncated
        tokenizer --input book.txt --vocab_size 256 --out b.json => --vocab_size 256 must be between 257
        tokenizer --input book.txt --out t.json => is there already
        tokenizer --input book.txt --out b.txt => is no .json
        tokenizer --input empty.txt --out b.json => empty.txt is empty
        tokenizer --input book.txt --out gs://bucket/t.json => --out gs:/bucket/t.json: only folders
        show none.jsonl --tokenizer t.json => none.jsonl: no such file
        show chat.jsonl => --tokenizer
        show chat.jsonl --tokenizer nowhere => --tokenizer nowhere
        show chat.jsonl --tokenizer t.json --n 0 => --n 0
        show chat.jsonl --tokenizer t.json => has no chat template
    """,
    "checkpoint": r"""
        to_hf run s3://bucket/model => to export to s3://bucket/model: only folders are written
        from_hf run s3://bucket/run => to export to s3://bucket/run: only folders are written
        source run s3://bucket/code => to export to s3://bucket/code: only folders are written
        from_hf gpt2 new => hf download gpt2 --local-dir gpt2
    """,
    "forks.train_gpt_oss": r"""
        --etp 2 => --etp 2
        --ac op => --ac op
    """,
    "forks.train_llama4": r"""
        --etp 2 => --etp 2
    """,
    "ablate": r"""
        REPO/train_llama3.py --vary lr=1e-3,3e-3 --out s3://bucket/study => --out s3://bucket/study: only folders
    """,
}
ROWS = [(program, *line.strip().split("=> ")) for program, lines in TABLE.items() for line in lines.strip("\n ").split("\n")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("messages")
    folder = root / "here"
    (folder / "folder").mkdir(parents=True)
    (folder / "book.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(3000)))
    for name in ("table.csv", "list.json"):
        (folder / name).write_text('{"text": "x"}')
    (folder / "empty.txt").touch()
    (folder / "other.jsonl").write_text(json.dumps({"content": "word"}))
    (folder / "one.jsonl").write_text(json.dumps({"text": "word " * 3000}))
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "u"}]}')
    (folder / "a.txt.gz").write_bytes(b"1")
    cut = open_data(DataConfig(data=str(folder / "book.txt"), cache_dir=str(root / "cache")), 32).folder
    shutil.copytree(cut, folder / "shards")
    shutil.copy(cut / "tokenizer.json", folder / "t.json")
    return folder


@pytest.mark.parametrize("program, typed, message", ROWS, ids=lambda text: text[:70])
def test_a_wrong_command_line_is_told_in_one_line(place, monkeypatch, capsys, program, typed, message):
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv, module = shlex.split(f"{BASE.get(program, '')} {typed}".replace("REPO", str(REPO))), importlib.import_module(program)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *argv])
    before = sorted(os.listdir(place))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as stop:
        if program == "ablate":
            runpy.run_path(str(REPO / "ablate.py"), run_name="__main__")
        elif program in ("data", "checkpoint"):
            main = importlib.import_module(f"tools.{program}_commands").main
            main(argv) if program == "checkpoint" else main()
        elif program == "generate":
            module.main(argv)
        else:
            launch.run(module.main, module.Config)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and err.count("\n") == 1 and re.search(message, err), err
    assert err.startswith("error: ") and "loss" not in out and not dist.is_initialized()
    made = set(os.listdir(place)) - set(before)  # a run is locked before its data is opened
    assert made <= ({"run"} if "--data" in typed else set()) and not (place / "run" / "metrics.jsonl").exists()
    shutil.rmtree(place / "run", ignore_errors=True)
