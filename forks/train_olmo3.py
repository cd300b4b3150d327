"""train_llama3.py with OLMo 3, see forks/olmo3.py: norms after attention and FFN, sliding windows,
norms over all heads.

    python forks/train_olmo3.py                                            # one process, on the built-in corpus
    torchrun --nproc_per_node 4 forks/train_olmo3.py --tp 2 --cp 2 --steps 20

Only the model is another, so this file is no copy: it puts OLMo 3 where train_llama3.py has Llama
3, and all the rest is that recipe's; recipe.py of a checkpoint is train_llama3.py, too. To change a
line of the loop, copy train_llama3.py and replace Llama3 and FLAVORS there.
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal

# this file is in a folder below the rest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train_llama3
from forks.olmo3 import FLAVORS, Olmo3
from tools.run import run
from train_llama3 import main

# what main() looks up
train_llama3.FLAVORS = FLAVORS
train_llama3.Llama3 = Olmo3


@dataclass(kw_only=True)
class Config(train_llama3.Config):
    flavor: Literal[tuple(FLAVORS)] = "debug"  # model size: see FLAVORS in forks/olmo3.py
    # folder for all files of the run; the same folder again continues the run
    out: str = "runs/olmo3"


if __name__ == "__main__":
    run(main, Config)
