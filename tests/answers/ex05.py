"""Answers to exercise 5."""

RIGHT = [
    """
def tp_plan(self):
    # in the FFN every matrix gathers its own input: one all-gather more, the same numbers
    plan = {"tok_embeddings": "vocab_embedding", "norm": "sequence"}
    if self.head is not None:
        plan["head"] = "vocab_head"
    for i in range(self.config.n_layers):
        plan |= {f"blocks.{i}.{name}": "sequence" for name in ("attn_norm", "ffn_norm")}
        plan |= {f"blocks.{i}.attn.{name}": "colwise" for name in ("wq", "wk", "wv")}
        plan |= {f"blocks.{i}.ffn.{name}": "gather_colwise" for name in ("w1", "w3")}
        plan |= {f"blocks.{i}.{name}": "rowwise" for name in ("attn.wo", "ffn.w2")}
        plan[f"blocks.{i}.attn"] = "gather_sequence"
    return plan
""",
    """
def tp_plan(self):
    # from the modules themselves: a norm is what has a vector as its weight
    plan = {}
    for name, module in self.named_modules():
        last = name.split(".")[-1]
        if last in ("attn", "ffn"):
            plan[name] = "gather_sequence"
        elif isinstance(module, nn.Linear):
            plan[name] = "vocab_head" if last == "head" else "rowwise" if last in ("wo", "w2") else "colwise"
        elif isinstance(module, nn.Embedding):
            plan[name] = "vocab_embedding"
        elif list(module.parameters(recurse=False)):
            plan[name] = "sequence"
    return plan
""",
]


def plan(**changes) -> str:
    """The usual plan with some of its rows changed, or with None left out."""
    rows = {"tok_embeddings": "vocab_embedding", "norm": "sequence", "head": "vocab_head"}
    for module, styles in (
        ("attn", dict(wq="colwise", wk="colwise", wv="colwise", wo="rowwise")),
        ("ffn", dict(w1="colwise", w3="colwise", w2="rowwise")),
    ):
        rows |= {f"blocks.*.{module}_norm": "sequence", f"blocks.*.{module}": "gather_sequence"}
        rows |= {f"blocks.*.{module}.{name}": style for name, style in styles.items()}
    rows = {name: changes.get(name.split(".")[-1], style) for name, style in rows.items()}
    rows = {name: style for name, style in rows.items() if style}
    return f"""
def tp_plan(self):
    return {{name: style for name, style in {rows}.items() if name != "head" or not self.config.tie_embeddings}}
"""


WRONG = [  # answer, what the feedback must say
    (
        plan(attn_norm=None, ffn_norm=None, norm=None),
        "on tp 2 its gradient is not whole: it saw half of the tokens; who adds up the other half?",
    ),
    (plan(norm=None), "norm.weight has no style"),
    (plan(attn=None, ffn=None), "Where a rank has T/tp of the tokens and where all T?"),
    (
        plan(ffn=None, w1="sequence_linear", w3="sequence_linear", w2="sequence_linear"),
        "holds all of blocks.0.ffn.w1",
    ),
    (plan().replace("blocks.*", "blocks.0"), "blocks.1"),
    (plan(w2="row"), "asks for style 'row'"),
]
