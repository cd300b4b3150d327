"""Run a recipe with one change in its GPU path, to measure whether it pays. Rows of gpu_report.py
compare with and without.

    torchrun --nproc_per_node 8 benchmarks/changed.py nccl_memory train_llama3.py --flavor 8B --compile --steps 20
    torchrun --nproc_per_node 8 benchmarks/changed.py one_part train_qwen3.py --flavor 30B-A3B --ep 8 --compile --steps 20

nccl_memory  FSDP gathers and reduces in memory of NCCL's own, which may then copy less, or sum in the switch (NVLink SHARP)
one_part     the tokens of --ep travel in one part, as on a CPU: no expert computes while they do
once_per_rank  besides, a token travels once to each rank, and not once to each expert (forks/once_per_rank.py)
"""

import runpy
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in benchmarks/ are files of the same names as the modules imported here

import torch
import torch.distributed as dist

import parallel
from distributed import experts
from forks.once_per_rank import apply_once
from models import deepseek, qwen3


def nccl_memory():
    def wrap_units(stage, layout, reduce_dtype, known=parallel.wrap_units):
        known(stage, layout, reduce_dtype)
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        if not backend.supports_tensor_alloc(torch.device("cuda", torch.cuda.current_device())):
            raise ValueError(
                "NCCL has no memory of its own on this machine: multicast (NVLink SHARP) is missing"
            )
        for module in stage.modules():
            if isinstance(module, parallel.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)

    parallel.wrap_units = wrap_units


def one_part():
    experts.PARTS["cuda"] = 1


def once_per_rank():
    for model in (deepseek, qwen3):
        model.apply_experts = apply_once


CHANGES = {"nccl_memory": nccl_memory, "one_part": one_part, "once_per_rank": once_per_rank}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in CHANGES:
        sys.exit(f"usage: changed.py {'|'.join(CHANGES)} recipe.py [flags]")
    CHANGES[sys.argv[1]]()
    sys.argv = sys.argv[2:]
    runpy.run_path(str(REPO / sys.argv[0]), run_name="__main__")
