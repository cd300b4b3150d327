"""Answers to exercise 18: the project's own, changed."""

from course import original, source_of

OWN = original("hand18.py").read_text()
STEP, MOMENTS = source_of(OWN, "zero1_step"), source_of(OWN, "moments")
SUM = "    reduce_scatter_single(total, grad.contiguous(), group=group)\n"
RIGHT = [STEP.replace(".chunk(n)[rank].clone()", ".view(n, -1).clone()[rank]")]
WRONG = [  # answer, what the feedback must say
    (STEP.replace(SUM, "    total = grad.chunk(n)[rank]\n"), "has seen its own gradient only"),
    (STEP.replace(SUM, SUM + "    total /= n\n"), "it is that of the mean"),
    (
        STEP.replace(SUM, SUM + "    dist.all_reduce(grad.clone(), group=group)\n"),
        "half of the traffic is for nothing",
    ),
    (
        STEP.replace(
            "all_gather_single(weight, mine, group=group)", "weight.view(n, -1)[rank] = mine"
        ),
        "part has moved",
    ),
    (STEP.replace("mine, group=group)", "mine)"), "Does every collective get its group"),
    (
        MOMENTS.replace(
            "zeros_like(part), torch.zeros_like(part)",
            "zeros_like(weight).chunk(n)[rank], part * 0",
        ),
        "the moments are what ZeRO-1 does not hold n times",
    ),
]
