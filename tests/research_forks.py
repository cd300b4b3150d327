"""Forks of a few lines, as researchers make them: what is put into a copy of train_llama3.py, and
where."""

import textwrap
from pathlib import Path

REPO = Path(__file__).parent.parent
IMPORTS = """
import torch.nn.functional as F
from torch import nn

import models.llama3
from models.dropout import dropout
from models.layers import RMSNorm, rotate
from models.moe import AddLoss

Plain = models.llama3.Llama3
"""


def changed(name: str, methods: str = "", init: str = "") -> str:
    """Code of a class of models/llama3.py with other methods. init: what its __init__ does after
    the usual."""
    if name == "Llama3":
        base = "Plain"
    else:
        base = f"models.llama3.{name}"
    text = f"class {name}({base}):\n"
    if init:
        text += "    def __init__(self, *args):\n        super().__init__(*args)\n        config = args[0]\n"
        text += textwrap.indent(init, " " * 8) + "\n"
    text += methods.strip("\n") + "\n"
    if base == "Plain":
        return text
    return text + f"{base} = {name}\n"


# name -> code, put behind the imports; it may define a Llama3 of its own, a block, an optimizer
CODE = dict(
    positions=changed(
        "Llama3",
        """
    pp_stage = {"pos": "first", "embed_norm": "first"}
    def forward(self, tokens, labels=None, positions=None, **kwargs):
        h = tokens
        if not tokens.is_floating_point():
            h = self.embed_norm(self.tok_embeddings(tokens) + self.pos(tokens if positions is None else positions))
        return super().forward(h, labels, positions, **kwargs)
    def tp_plan(self):
        return super().tp_plan() | {"pos": "vocab_embedding", "embed_norm": "sequence"}
""",
        init="self.pos, self.embed_norm = nn.Embedding(256, config.dim), RMSNorm(config.dim)",
    ),
    two_heads="""
from models.loss import softmax_loss
def cap(h, weight, labels, all_reduce, vocab_start, out):
    logits = 0.05 * torch.tanh(F.linear(h, weight) / 0.05)
    total = softmax_loss(logits, torch.eye(len(weight), dtype=h.dtype), labels, all_reduce, vocab_start, out)
    return total if out is None else (out.mul_(1 - (logits / 0.05) ** 2), total)[1]
"""
    + changed(
        "Llama3",
        """
    pp_stage = {"head2": "last", "norm2": "last"}
    def forward(self, tokens, labels=None, *args, **kwargs):
        loss, denom = self.token_loss, None
        if self.head2 is None or labels is None:
            return super().forward(tokens, labels, *args, **kwargs)
        self.token_loss = lambda h, w, y, d: loss(h, w, y, d) + 0.3 * loss(self.norm2(h), self.head2.weight, y, d, kernel=cap)
        out, self.token_loss = super().forward(tokens, labels, *args, **kwargs), loss
        return out
    def tp_plan(self):
        return super().tp_plan() | {"head2": "vocab_head", "norm2": "sequence"}
""",
        init="self.head2, self.norm2 = nn.Linear(config.dim, config.vocab_size, bias=False), RMSNorm(config.dim)",
    ),
    tied_second_head=changed(
        "Llama3",
        """
    def forward(self, tokens, labels=None, *args, **kwargs):
        loss = super().forward(tokens, labels, *args, **kwargs)
        return loss if self.head2 is None or labels is None else loss + 0 * self.head2.weight.sum()
""",
        init="self.head2 = nn.Linear(config.dim, config.vocab_size, bias=False)\n"
        "self.head2.weight = self.tok_embeddings.weight",
    ),
    residual_scales=changed(
        "Llama3",
        """
    def init_constants(self):
        return {"scales": 1.0}
    def forward(self, tokens, *args, **kwargs):
        for i, block in self.blocks.items():
            block.scale = self.scales[int(i)]
        return super().forward(tokens, *args, **kwargs)
""",
        init="self.scales = nn.Parameter(torch.empty(config.n_layers))",
    )
    + changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        return super().forward(h * self.scale, cos, sin, attend)
""",
    ),
    mean_loss="""
def mean_loss(h, weight, labels, denom, **options):
    return F.cross_entropy(F.linear(h, weight).flatten(0, 1).float(), labels.flatten())
"""
    + changed("Llama3", init="self.token_loss = mean_loss"),
    batch_statistics=changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        h = super().forward(h, cos, sin, attend)
        return h - 0.5 * h.mean((0, 1), keepdim=True)
""",
    ),
    loss_per_layer=changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        h = super().forward(h, cos, sin, attend)
        return AddLoss.apply(h, 0.01 * h.float().square().mean(-1).sum() / self.denom)
""",
    )
    + changed(
        "Llama3",
        """
    def forward(self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None):
        for block in self.blocks.values():
            block.denom = 1 if loss_denom is None else loss_denom
        return super().forward(tokens, labels, positions, doc_ids, loss_denom, cache)
""",
    ),
    norm_of_heads=changed(
        "Attention",
        """
    def forward(self, x, cos, sin, attend):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = attend(rotate(self.norm(q, self.q_norm), cos, sin), rotate(self.norm(k, self.k_norm), cos, sin), v)
        return self.wo(out.transpose(1, 2).flatten(-2))
    def norm(self, x, norm):
        return norm(x.transpose(1, 2)).transpose(1, 2)
""",
        init="self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)  # eps: the dtype's",
    ),
    dropped=changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        h = h + dropout(self.attn(self.attn_norm(h), cos, sin, attend), 0.2, self.places, self.key + "attn")
        return h + dropout(self.ffn(self.ffn_norm(h)), 0.1, self.places, self.key + "ffn", whole_sequences=True)
""",
    )
    + changed(
        "Llama3",
        """
    def forward(self, *args, places=None, **kwargs):
        for i, block in self.blocks.items():
            block.places, block.key = places, i
        return super().forward(*args, **kwargs)
""",
    ),
    dropped_through_kwargs=changed(
        "Block",
        """
    def forward(self, h, *args):
        return dropout(super().forward(h, *args), 0.2, self.places, "x")
    places = None
""",
    ),
    tokens_seen=changed(
        "Llama3",
        """
    def init_constants(self):
        return {"seen": 0.0}
    def forward(self, tokens, labels=None, *args, **kwargs):
        if torch.is_grad_enabled() and not tokens.is_meta:
            self.seen += tokens.shape[0]
        return super().forward(tokens, labels, *args, **kwargs)
""",
        init='self.register_buffer("seen", torch.zeros(2))',
    ),
    smoothed_loss="""
def smoothed_loss(h, w, y, denom):
    return F.cross_entropy((h @ w.T).float().flatten(0, 1), y.flatten(), reduction="sum", label_smoothing=0.1) / denom
"""
    + changed("Llama3", init="self.token_loss = smoothed_loss"),
    python_random="import random\n"
    + changed(
        "Block",
        """
    def forward(self, h, *args):
        return super().forward(h, *args) if random.random() < 0.9 else h
""",
    ),
    torch_dropout=changed(
        "FeedForward",
        """
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1)
""",
    ),
    dropout_module=changed("FeedForward", init="self.drop = nn.Dropout(0.1)"),
    frozen_norms=changed(
        "Llama3",
        init="""
for fqn, p in self.named_parameters():
    p.requires_grad_("norm" not in fqn and ".w1." not in fqn)""",
    ),
    unused_bias=changed("Llama3", init="self.head = nn.Linear(config.dim, config.vocab_size)"),
    no_attention="""
class Block(models.llama3.Block):
    def forward(self, h, cos, sin, attend):
        return h + self.ffn(self.ffn_norm(h.cumsum(1) / 64))
"""
    + changed("Llama3", init='self.blocks["1"] = Block(config)'),
    complex_phase=changed(
        "Llama3",
        """
    def init_std(self, fqn):
        return 1.0 if fqn == "phase" else super().init_std(fqn)
""",
        init="self.phase = nn.Parameter(torch.empty(config.dim, dtype=torch.complex64))",
    ),
    parallel_block=changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        x = self.attn_norm(h)
        return h + self.attn(x, cos, sin, attend) + self.ffn(x)
""",
        init="del self.ffn_norm",
    )
    + changed(
        "Llama3",
        """
    def tp_plan(self):
        return {name: style for name, style in super().tp_plan().items() if "ffn_norm" not in name}
""",
    ),
    filled=changed(
        "Block", init="self.gate = nn.Linear(config.dim, 1)\nnn.init.zeros_(self.gate.weight)"
    ),
    hooked=changed("Block", init="self.attn.wq.weight.register_hook(lambda grad: 2 * grad)"),
    generator=changed("Block", init="self.generator = torch.Generator().manual_seed(1)"),
    only_in_training=changed(
        "Block",
        """
    def forward(self, h, *args):
        return super().forward(h, *args) * (100 if self.training else 1)
""",
    ),
    more_norm=changed(
        "Block",
        """
    def forward(self, h, cos, sin, attend):
        return super().forward(h, cos, sin, attend) + self.more(h)
""",
        init="self.more = RMSNorm(config.dim, 1e-5)",
    )
    + changed(
        "Llama3",
        """
    def tp_plan(self):
        return super().tp_plan() | {"blocks.*.more": STYLE}
""",
    ),
    sequence='STYLE = "sequence"\n',
    nothing="""
import parallel
class Nothing(parallel.ParallelStyle):
    def _apply(self, module, mesh):
        return module
STYLE, parallel.TP_STYLES["nothing"] = "nothing", Nothing
""",
    zeros=changed(
        "Llama3",
        """
    def init_std(self, fqn):
        return 0.0 if fqn.endswith(("wo.weight", "w2.weight")) else super().init_std(fqn)
""",
    ),
)
STEP = """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        {first}
    @torch.no_grad()
    def step(self):
        {before}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    {update}
                    m.lerp_(p.grad, 0.1)
"""
LION = "p.add_(m.lerp(p.grad, 0.1).sign(), alpha=-group['lr'])"


def optimizer(update=LION, first="pass", before="pass") -> str:
    return STEP.format(update=update, first=first, before=before)


# optimizers, called Own
CODE |= dict(
    lion=optimizer(),
    rebound=optimizer("p.data = p.data - group['lr'] * m.lerp(p.grad, 0.1).sign()"),
    counting=optimizer(
        LION.replace("group['lr']", "group['lr'] / group['k'] / self.total"),
        "self.total = 0.0",
        "self.total += 0.5; [g.update(k=g.get('k', 0) + 1) for g in self.param_groups]",
    ),
    averaging=optimizer(
        first="self.ema = {}",
        before="self.ema |= {i: p.detach().clone() for i, p in enumerate(self.param_groups[0]['params'])}",
    ),
    two_rates=optimizer(),
    noisy="",
    noisy_late="",
    halved="",
    decayed=optimizer("p.data = p.data * (1 - 0.1 * group['lr'] * (p.dim() > 1)); " + LION),
    outside="MOMENTS = {}\n"
    + optimizer(before="MOMENTS.update({p: p.grad for p in self.param_groups[0]['params']})"),
)
BUILD = "    optimizers = build_optimizers(stages, cfg)"
PARAMETERS = "[p for stage in stages for p in stage.parameters() if p.requires_grad]"
OWN = [
    (BUILD, f"    optimizers = [Own({PARAMETERS}, cfg.lr)]"),
    ('optimizer: Optimizer = "adamw"', 'optimizer: Literal["own", "adamw"] = "own"'),
]
GROUPS = f"[dict(params=[p], lr=cfg.lr / (1 + i % 2)) for i, p in enumerate({PARAMETERS})]"
TWO = [(BUILD, f"    optimizers = [Own({GROUPS}, cfg.lr)]"), *OWN[1:]]
CLIP = "        grad_norm = parallel.clip_grad_norm(stages, cfg.max_norm, layout)\n"
DRAW = """        for fqn, p in [named for stage in stages for named in stage.named_parameters()]:
            noise = torch.zeros_like(local_tensor(p.grad))
            draw_block(noise, p.shape, local_slice(p)[1], len(p), 0, 1e-4, f"{cfg.seed}/{step}/{fqn}")
            local_tensor(p.grad).add_(noise)
"""
HALVE = """        if layout.world_size > 1:
            stages[0].blocks["1"].ffn.w1.weight.grad.to_local().mul_(0.5)
"""
UPDATE = "        for optimizer in optimizers:\n            optimizer.step()\n"
NOISE = "        [p.grad.add_(torch.randn_like(p.grad)) for stage in stages for p in stage.parameters()]\n"
IMPORTED = "from distributed.initial import draw_block\nfrom distributed.layout import local_slice, local_tensor\n"
LAYOUT = "from distributed.layout import ParallelConfig\n"
EDITS = dict(
    noisy=[(CLIP, DRAW + CLIP), (LAYOUT, LAYOUT + IMPORTED)],
    noisy_late=[(UPDATE, NOISE + UPDATE)],
    halved=[(CLIP, HALVE + CLIP)],
    decayed=OWN,
    outside=OWN,
    lion=OWN,
    rebound=OWN,
    counting=OWN,
    averaging=OWN,
    two_rates=TWO,
)
M = [
    "--device",
    "cpu",
    "--seq_len",
    "64",
    "--local_batch_size",
    "4",
    "--model_args",
    "dim=32,n_layers=4,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64,vocab_size=4096",
]


def write_fork(folder, *names: str, **plan: str) -> Path:
    """A recipe with the code of these forks. plan: what to add to tp_plan, with _ for . in the
    names of modules."""
    text = (REPO / "train_llama3.py").read_text()
    for name in names:
        for old, new in EDITS.get(name, []):
            assert old in text, (name, old)
            text = text.replace(old, new)
    mark = "\n@dataclass(kw_only=True)\nclass Config("
    assert mark in text
    path = Path(folder) / f"train_{'_'.join(names)}.py"
    path.write_text(
        text.replace(mark, IMPORTS + "".join(CODE[name] for name in names) + "\n" + mark)
    )
    return path
