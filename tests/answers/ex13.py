"""Answers to exercise 13."""

REPLICAS = """
def replicas(grad, layout):
    parts = 1
    if isinstance(grad, DTensor):
        for size, placement in zip(grad.device_mesh.shape, grad.placements):
            parts *= 1 if placement.is_replicate() else size
    return layout.world_size // (layout.pp * parts)
"""
CLIP = """
def clip_grad_norm(stages, max_norm, layout):
    squares = torch.zeros((), dtype=torch.float64)
    grads = []
    for stage in stages:
        for p in stage.parameters():
            if p.grad is None:
                continue
            grads.append(local_tensor(p.grad))
            if p is not tied_copy(stage):
                squares += grads[-1].double().square().sum() / replicas(p.grad, layout)
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if max_norm > 0 and norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)
    return norm
"""
assert CLIP.count("dist.all_reduce(squares)") == 1


RIGHT = [
    # whole gradients in place of parts: more bytes, nothing to divide; every rank of a stage then
    # has the stage's sum
    """
def clip_grad_norm(stages, max_norm, layout):
    params = [(s, p) for s in stages for p in s.parameters() if p.grad is not None]
    total = 0.0
    for stage, p in params:
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if tied_copy(stage) is not p:
            total += torch.linalg.vector_norm(whole, dtype=torch.float64).item() ** 2
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(layout.world_size)]
    dist.all_gather(sums, torch.tensor(total, dtype=torch.float64))
    norm = (torch.stack(sums).sum() * layout.pp / layout.world_size).sqrt().float()
    for _, p in params if 0 < max_norm < norm.item() else ():
        p.grad.mul_(max_norm / norm.item())
    return norm
""",
    REPLICAS + CLIP,
]
WRONG = [
    (CLIP.replace("    dist.all_reduce(squares)\n", ""), "each rank has the norm of its own part"),
    (CLIP.replace(" / replicas(p.grad, layout)", ""), "also those that several ranks hold"),
    (CLIP.replace("if p is not tied_copy(stage)", "if True"), "the tied weight is counted twice"),
    (
        "def replicas(grad, layout):\n"
        "    return layout.world_size // layout.pp * local_tensor(grad).numel() // grad.numel()\n",
        "replicas gives 0 for the gradient of tok_embeddings.weight on rank 1",
    ),
    (
        "def replicas(grad, layout):\n    n = max(local_tensor(grad).numel(), 1)\n"
        "    return layout.world_size // layout.pp // round(grad.numel() / n)\n",
        "Numbers of elements do not tell",
    ),
    (
        CLIP.replace(
            "            grads.append(local_tensor(p.grad))\n            if p is not "
            "tied_copy(stage):\n",
            """
            if p is not tied_copy(stage):
                grads.append(local_tensor(p.grad))
""",
        ),
        "It is the tied copy: it must stay equal to the original",
    ),
    (
        """
def clip_grad_norm(stages, max_norm, layout):
    grads = [p.grad for s in stages for p in s.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads).full_tensor()
    for grad in grads if max_norm > 0 else ():
        grad.mul_((max_norm / norm).clamp(max=1.0).item())
    return norm
""",
        "experts have another one than the rest",
    ),
    (
        """
def replicas(grad, layout):
    whole = not isinstance(grad, DTensor) or all(x.is_replicate() for x in grad.placements)
    return layout.world_size // layout.pp if whole else 1
""",
        "4 ranks, dp_replicate 2 and dp_shard 2: two copies, each in two parts: replicas gives 1",
    ),
]
