"""The check of exercise 4: two processes with half of each matrix, against the whole matrices in plain torch."""
import hand04
import torch
import torch.distributed as dist
import torch.nn.functional as F
from feedback import Wrong, on_ranks

N, D, CHANNELS, TP = 5, 6, 8, 2
NAMES = ("x", "w1", "w3", "w2")


def problem() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (N, D), "w1": (CHANNELS, D), "w3": (CHANNELS, D), "w2": (D, CHANNELS), "out": (N, D)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def swiglu(x, w1, w3, w2):
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def on_a_rank() -> dict[str, torch.Tensor]:
    """The result of ffn, the gradient of each argument on this rank, and x after the call (ffn must not change x)."""
    p = problem()
    parts = hand04.split_weights(p["w1"], p["w3"], p["w2"], dist.get_rank(), TP)
    leaves = [t.clone().requires_grad_() for t in (p["x"], *parts)]
    x, *weights = leaves
    before = x * 1  # not a leaf, like the output of a layer before
    y = hand04.ffn(before, *weights, dist.group.WORLD)
    (y * p["out"]).sum().backward()
    return {"y": y.detach(), "x": x.grad, "x itself": before.detach()} | dict(zip(NAMES[1:], [w.grad for w in weights]))


def check_split(p):
    want = {"w1": p["w1"].split(CHANNELS // TP), "w3": p["w3"].split(CHANNELS // TP), "w2": p["w2"].split(CHANNELS // TP, 1)}
    for rank in range(TP):
        for name, part in zip(NAMES[1:], hand04.split_weights(p["w1"], p["w3"], p["w2"], rank, TP), strict=True):
            shape, right = tuple(part.shape), tuple(want[name][rank].shape)
            if shape != right:
                raise Wrong(f"split_weights gives rank {rank} of {TP} a {name} of {shape}, and should give {right}: the "
                            f"channels of h are the rows of w1 and w3 and the columns of w2; {name} is {tuple(p[name].shape)}")
            if not torch.equal(part, want[name][rank]):
                raise Wrong(f"split_weights gives rank {rank} of {TP} other rows or columns of {name} than number {rank}: w1, "
                            "w3 and w2 of a rank must be about the same channels, and the ranks' channels stand in order")


def factor(mine, want) -> float:
    """c with mine = c * want; NaN if no c fits."""
    by = ((mine * want).sum() / (want * want).sum()).item()
    return by if torch.allclose(mine, by * want) else float("nan")


def check_gradients(got, leaves, parts):
    """parts: name -> the right gradient per rank; leaves: gradient of x through each rank's own channels only."""
    for name in NAMES:
        for rank, result in enumerate(got):
            mine, want = result[name], parts[name][rank]
            if mine is None:
                raise Wrong(f"{name} has no gradient on rank {rank}: is there a way from the result back to it? A collective "
                            "that is called outside of a torch.autograd.Function ends it")
            if torch.allclose(mine, want):
                continue
            head = f"the gradient of {name} on rank {rank} of {TP} is"
            if name == "x" and torch.allclose(mine, leaves[rank]):
                raise Wrong(f"{head} missing an all-reduce: it is what this rank's channels say about x, and the other ranks' "
                            "channels saw x as well. Who adds them up? (The weights' gradients are right, and all layers "
                            "before are wrong.)")
            by = factor(mine, want)
            if by == by and abs(by - 1) > 1e-6:
                raise Wrong(f"{head} {by:.3g} times what it should be. All ranks compute the same loss, and it counts once: "
                            "does a backward add up equal things? The gradient goes through the forward's sum as it is")
            raise Wrong(f"{head} wrong by {((mine - want).norm() / want.norm()).item():.2f} (relative). A rank's own part of "
                        "w2, and only that, decides what comes back to its channels; what has each collective's backward to "
                        "do?")


def check():
    p = problem()
    check_split(p)
    leaves = {name: p[name].clone().requires_grad_() for name in NAMES}
    y = swiglu(**leaves)
    (y * p["out"]).sum().backward()
    parts = {name: leaves[name].grad.chunk(TP, dim) for name, dim in (("w1", 0), ("w3", 0), ("w2", 1))}
    parts["x"] = [leaves["x"].grad] * TP
    alone, summands = [], []  # through a rank's own channels only: gradient of x, summand of y
    for rank in range(TP):
        x = p["x"].clone().requires_grad_()
        own = swiglu(x, *(p[name].chunk(TP, dim)[rank] for name, dim in (("w1", 0), ("w3", 0), ("w2", 1))))
        (own * p["out"]).sum().backward()
        alone.append(x.grad)
        summands.append(own.detach())
    got = on_ranks(TP, on_a_rank)
    for rank, result in enumerate(got):
        if not torch.equal(result["x itself"], p["x"]):
            raise Wrong("ffn changes x, which the layer before still needs: all_reduce works in place, so clone what you give "
                        "it")
        if torch.allclose(result["y"], summands[rank]):
            raise Wrong(f"the result on rank {rank} of {TP} is its own summand: w2 has only this rank's channels. Who adds up "
                        "the ranks'?")
        if not result["y"].shape == y.shape or not torch.allclose(result["y"], y.detach()):
            raise Wrong(f"the result on rank {rank} of {TP} differs from silu(x w1') * (x w3') times w2' with whole matrices. "
                        "Is it summed over the ranks once, at the end, and nowhere else in the forward?")
    check_gradients(got, alone, parts)
