"""Answers to exercise 14."""


def answer(body: str):
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return f"\ndef draw_block(local, whole, offset, rows, b, std, name):\n{lines}\n"


SEED = "g = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))"
PLACE = """
for i in range(len(local)):
    row = offset[0] + i - b * rows
    if 0 <= row < len(block):
        local[i] = block[row][tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:]))]
"""
DRAW = "torch.randn(min(rows, whole[0] - b * rows), *whole[1:], generator=g)"
RIGHT = [
    # the columns by narrow, row by row, and another hash
    answer("""
g = torch.Generator()
g.manual_seed(int.from_bytes(hashlib.md5(name.encode()).digest()[:6], "big"))
n = min((b + 1) * rows, whole[0]) - b * rows
block = torch.normal(0.0, std, (n, *whole[1:]), generator=g)
for dim in range(1, len(whole)):
    block = block.narrow(dim, offset[dim], local.shape[dim])
for row in range(n):
    if offset[0] <= b * rows + row < offset[0] + len(local):
        local[b * rows + row - offset[0]] = block[row]
"""),
    # row by row, each row of the block drawn from the same generator; what is not needed is drawn
    # and thrown away
    answer(
        SEED
        + """
for row in range(b * rows, min((b + 1) * rows, whole[0])):
    drawn = torch.randn(tuple(whole[1:]), generator=g) * std
    if offset[0] <= row < offset[0] + len(local):
        local[row - offset[0]] = drawn[tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:]))]
"""
    ),
]
WRONG = [
    (
        answer(f"block = {DRAW.replace('generator=g', '')} * std" + PLACE),
        "Which generator does torch.randn take?",
    ),
    (
        answer(
            SEED.replace("manual_seed(", "manual_seed(offset[0] + ")
            + f"\nblock = {DRAW} * std"
            + PLACE
        ),
        "rows 5 to 9, of a parameter (10, 6) in blocks of 4 rows: row 0 of local, row 5 of the "
        "parameter, is not what a rank",
    ),
    (
        answer(
            SEED
            + "\nbegin, end = max(offset[0], b * rows), min(offset[0] + len(local), (b + 1) * rows)\n"
            "local[begin - offset[0] : end - offset[0]] = torch.randn(end - begin, "
            "*local.shape[1:], generator=g) * std"
        ),
        "is not what a rank that holds the whole parameter has there",
    ),
    (
        answer(
            "import os\nname += os.environ.get('RANK', '0')\n"
            + SEED
            + f"\nblock = {DRAW} * std"
            + PLACE
        ),
        "Does the rank go into the seed?",
    ),
    (
        answer(
            "name += str(torch.distributed.get_rank())\n" + SEED + f"\nblock = {DRAW} * std" + PLACE
        ),
        "the rank go",
    ),
    (
        answer(f"g = torch.Generator().manual_seed(7)\nblock = {DRAW} * std" + PLACE),
        "blocks.0.wq and blocks.1.wq start equal",
    ),
    (
        answer(f"g = torch.Generator().manual_seed(abs(hash(name)))\nblock = {DRAW} * std" + PLACE),
        "hash(name) differs",
    ),
    (answer(SEED + f"\nblock = {DRAW}" + PLACE), "and standard deviation 0.99"),
    (
        answer(
            f"g = torch.Generator().manual_seed(sum(name.encode()))\nblock = {DRAW} * std" + PLACE
        ),
        "the same letters in another order",
    ),
]
