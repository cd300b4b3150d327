"""The first program: two processes, one sum. torchrun --nproc_per_node 2 docs/first.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # the processes find each other; "nccl" on GPUs
rank = dist.get_rank()
n = dist.get_world_size()
x = torch.tensor([1.0, 2.0]) * (rank + 1)
print(f"rank {rank} of {n} has {x.tolist()}")
dist.all_reduce(x)  # every process calls this line, and waits here for the others
print(f"rank {rank} of {n} has the sum {x.tolist()}")
dist.destroy_process_group()
