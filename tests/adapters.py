"""Flags of adapters, by the names that rows of layouts.txt give them."""

LORA = dict(lora_rank=4)
ALL = dict(lora_rank=4, lora_on=("wq", "wv", "wo", "w1", "w2", "w3"))
MLA = dict(lora_rank=4, lora_on=("wq*", "wkv_a", "wkv_b", "wo", "w1"))
