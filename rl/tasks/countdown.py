"""A task of grpo.py (--env countdown): reach a number with +, - and * and each of three numbers once.

    python grpo.py --env countdown --out runs/countdown

"3 7 2 = 19: " -> "3*7-2". Any right way earns 1, also with / and brackets.
"""

import random
import re
import string

from rl.tasks.calculator import arithmetic

ALPHABET = string.digits + "+-*()=: "


def make(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(1, 9) for _ in range(3)]
    answer = ""
    for number in rng.sample(numbers, 3):
        answer += f"{rng.choice('+-*')}{number}"
    answer = answer[1:]
    return f"{' '.join(map(str, numbers))} = {arithmetic(answer)}: ", answer


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    numbers, target = prompt.rstrip(": ").split(" = ")
    used = sorted(re.findall(r"\d+", completion))
    value = arithmetic(completion)
    is_right = used == sorted(numbers.split()) and value == int(target)
    return float(is_right and not truncated)
