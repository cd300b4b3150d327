"""--lora_nf4, against distributed/nf4.py: training above 4 bits is training above the weights that they stand for."""
from unittest import mock

import dry
import layouts
import pytest
import torch
from layouts import Flags, build, compare, config, drawn_adapters, full, global_batch, local_batch, row_name
from pool import pool
from runs import launch, run
from test_adapters import flags_of, identity_of, open_run, written_base
from test_cast import everything_of_two_steps
from test_lora import one_layout
from test_parallel import MOE, MTP

import parallel
from checkpoint import load_model
from distributed.checks import check_model
from distributed.layout import local_tensor
from distributed.nf4 import LEVELS, block_matrices, bytes_of, is_nf4, pack_rows, quantize_base, unpack_rows
from parallel import TP_STYLES
from support import hf
from support.resume import check_run

WIDE = dict(head_dim=16, ffn_dim=128)  # rows of which a tp rank has whole blocks
LATENT = MTP | dict(q_lora_rank=32, v_head_dim=16, ffn_dim=128, moe_ffn_dim=128)
NF4 = dict(lora_rank=4, lora_nf4=True)
ALL = NF4 | dict(lora_on=("wq", "wv", "wo", "w1", "w2", "w3"))
MLA = NF4 | dict(lora_on=("wq*", "wkv_a", "wkv_b", "wo", "w1"))
LAYOUTS = [  # as in test_lora.py: each against plain torch with the weights that the 4 bits stand for
    (1, ALL, dict(n=6, b=2, doc=True)),
    (2, NF4 | dict(reduce_grads="always"), dict(n=8, b=2, tie_embeddings=True)),
    (2, NF4 | dict(cp=2), dict(n=4, b=2)),
    (2, NF4 | dict(tp=2, ep=2), dict(n=4, b=2, **MOE, **WIDE)),
]
SLOW = [
    (4, ALL | dict(dp_replicate=2, dp_shard=2), dict(n=8, b=2)),
    (2, ALL | dict(tp=2, ac="op"), dict(n=4, b=2, **WIDE)),
    (4, MLA | dict(ep=2, tp=2, etp=2), dict(n=4, b=1, **LATENT)),
]


def rounded(w, block=64):
    out = torch.empty_like(w)
    unpack_rows(pack_rows(w, block), block, out)
    return out


@pytest.mark.parametrize("row", [*LAYOUTS, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=row_name)
def test_layout_equals_one_process(row):
    assert compare(*row) == ""


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype, bits", [(torch.float32, 4.5), (torch.bfloat16, 4.25)])
def test_numbers_are_the_nearest_levels_of_their_block(dtype, bits):
    w = (torch.randn(3, 40, 192, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    w[1, 2, 64:128] = 0
    packed = pack_rows(w, 64)
    assert 8 * packed.numel() / w.numel() == bits
    blocks, levels = w.float().unflatten(-1, (3, 64)), torch.tensor(LEVELS)
    scale = blocks.abs().amax(-1, keepdim=True)
    nearest = levels[(blocks[..., None] - scale[..., None] * levels).abs().argmin(-1)] * scale
    error = (rounded(w).float().unflatten(-1, (3, 64)) - nearest).abs()
    assert (error <= scale * torch.finfo(dtype).eps).float().mean() > 0.999 and (error <= scale * 0.01).all()
    assert not rounded(w)[1, 2, 64:128].any()
    with mock.patch("distributed.nf4.AT_ONCE", 192 * 7):  # pieces, the last of which is shorter
        assert torch.equal(pack_rows(w, 64), packed) and torch.equal(rounded(w), rounded(w.clone()))
    assert torch.equal(rounded(rounded(w)), rounded(w))


def test_numbers_are_torchaos_but_for_the_scales():
    from torchao.quantization import NF4Tensor

    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    theirs, ours = NF4Tensor.from_tensor(w, 64, 256), pack_rows(w, 64)
    assert (theirs.quantized_data == ours[:, :256].flatten()).float().mean() > 0.999  # their levels have four digits
    error = [(t - w).norm() / w.norm() for t in (theirs.get_original_weight(), rounded(w))]
    assert 0.99 * error[0] < error[1] <= error[0]


# ---------------------------------------------------------------- while a model trains
@pytest.mark.parametrize("flags", [{}, dict(ac="full", lora_on=("wq", "w2"))], ids=str)
def test_mixed_precision_on_one_process_equals_fsdp_to_the_last_bit(flags):
    flags = NF4 | dict(compute_dtype="bfloat16") | flags
    ours, fsdps = (pool(1).run(everything_of_two_steps, {}, flags, under, "*.lora_*")[0] for under in (False, True))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, fsdps, strict=True))


def bytes_of_base(flags: dict) -> tuple:
    """Of the blocks' frozen matrices on this rank: (bytes in 4 bits, numbers, bytes left of what they were packed from), and
    how many blocks are unpacked in each block's forward, at its backward, and after the step."""
    with mock.patch.object(layouts, "quantize_base", lambda *args: None):
        stages, layout = build(config(dim=64, **WIDE), flags, 4, 2)
    frozen = {fqn: p for fqn, p in block_matrices(stages[0]).items() if not p.requires_grad}
    before = [local_tensor(p.detach()).untyped_storage() for p in frozen.values()]
    quantize_base(stages, layout)
    packed = [local_tensor(p) for fqn, p in block_matrices(stages[0]).items() if fqn in frozen]
    assert all(map(is_nf4, packed)) and not any(is_nf4(p) for p in stages[0].parameters() if p.requires_grad)
    rest, seen, blocks = sum(s.nbytes() for s in before), [], list(stages[0].blocks.values())
    weights = {}  # block -> its unpacked weight, which is one tensor for as long as the model lives

    def look(*args):
        seen.append(0)
        for block in blocks:
            if not is_nf4(weight := block.ffn.w1.weight):
                weights[block] = local_tensor(weight.detach()).untyped_storage()
            seen[-1] += block in weights and weights[block].nbytes() > 0

    for block in blocks:
        block.attn.register_forward_pre_hook(look)
        block.attn.register_full_backward_pre_hook(look)
    parallel.forward_backward(stages, local_batch(global_batch(0, 4, False), layout), layout)
    look()
    return sum(map(bytes_of, packed)), sum(t.numel() for t in packed), rest, seen


TP_BF16 = dict(tp=2, compute_dtype="bfloat16")


@pytest.mark.parametrize("processes, flags", [(1, {}), (1, dict(ac="full")), (2, {}), (2, TP_BF16)], ids=str)
def test_between_its_uses_a_weight_takes_four_bits(processes, flags):
    for size, numbers, rest, seen in pool(processes).run(bytes_of_base, ALL | flags):
        assert (8 * size, rest) == ((4.25 if "compute_dtype" in flags else 4.5) * numbers, 0)
        assert numbers == 4 * (64 * (128 + 2 * 64 + 128) + 3 * 64 * 128) // processes
        # one computes; the last one of a backward stays for the next micro-batch where nothing asks for its input's gradient
        assert seen[-1] == 0 and {1} <= set(seen[:-1]) <= {1, 2} and len(seen) > 8


def trained(out, base: str, flags: dict, last: int) -> tuple:
    """As a recipe does it: continue `out`, or begin with the weights of `base`, train up to step `last`, and save. Losses of
    the same batch again and again, and the adapters."""
    with mock.patch.object(layouts, "quantize_base", lambda *args: None), drawn_adapters():
        stages, layout = build(config(), flags, 4, 2)
    optimizer = torch.optim.AdamW([p for p in stages[0].parameters() if p.requires_grad], lr=1e-2)
    store = open_run(out, stages, config(), flags_of(NF4, init_from=base), [optimizer])
    done, losses = (store.load() or {"step": 0})["step"], []
    quantize_base(stages, layout)
    for _ in range(done, last):
        loss = parallel.forward_backward(stages, local_batch(global_batch(0, 4, False), layout), layout)
        losses.append(parallel.reduce_loss(loss, layout)[0].item())
        optimizer.step()
        optimizer.zero_grad()
    store.save(last, {"step": last}, last=True)
    store.close()
    hf.save_hf(stages, f"{out}-merged-{last}", torch.float32)
    return losses, {fqn: full(p) for fqn, p in stages[0].named_parameters() if p.requires_grad}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_a_continued_run_is_the_same_and_exports_say_which_base(processes, tmp_path):
    model, base = written_base(tmp_path / "base", {})
    flags, weights = NF4 | dict(lora_alpha=6), dict(model.named_parameters())
    losses, adapters = pool(processes).run(trained, tmp_path / "one", base, flags, 6)[0]
    begun, _ = pool(processes).run(trained, tmp_path / "two", base, flags, 3)[0]
    ended, again = pool(processes).run(trained, tmp_path / "two", base, flags, 6)[0]
    assert losses == begun + ended and all(torch.equal(t, again[fqn]) for fqn, t in adapters.items())
    assert losses[0] - losses[-1] > 0.1
    # exported by the run: 4 bits, as it trained; from its checkpoint: the base in full
    merged, _ = hf.load_hf_model(f"{tmp_path}/one-merged-6")
    whole = dict(load_model(str(tmp_path / "one"))[0].named_parameters())
    for fqn, weight in merged.named_parameters():
        name = fqn.removesuffix(".weight")
        a, b = (adapters.get(f"{name}.lora_{x}.weight") for x in "ab")
        added = 0 if a is None else 6 / 4 * b @ a
        is_packed = fqn in block_matrices(model)
        below = rounded(weights[fqn].detach(), min(64, weights[fqn].shape[-1])) if is_packed else weights[fqn]
        torch.testing.assert_close(weight, below + added, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole[fqn], weights[fqn] + added, rtol=0, atol=1e-6)
        assert is_packed == bool((whole[fqn] - weight).norm() > 0.03 * weight.norm())


def test_adapters_of_4_bits_do_not_go_on_without(tmp_path):
    _, base = written_base(tmp_path / "base", {})
    pool(1).run(trained, tmp_path / "run", base, NF4 | dict(lora_alpha=6), 1)
    cfg = flags_of(dict(lora_rank=4), init_from=base, out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="^lora.nf4 is not set but .* was trained with True"):
        check_run(str(tmp_path / "run"), identity_of(config(), cfg), cfg)


# ---------------------------------------------------------------- what it costs, and what is refused
@pytest.mark.slow
def test_the_dry_run_counts_the_bits():
    plain, packed = dry.report_of(dp_shard=2, lora_rank=4), dry.report_of(dp_shard=2, lora_rank=4, lora_nf4=True)
    numbers = 5 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128) // 2  # of dry.SMALL
    saved = plain.ranks[0].step["parameters"] - packed.ranks[0].step["parameters"]
    assert saved == numbers * 4 - numbers * 4.5 / 8
    assert packed.ranks[0].step_peak < plain.ranks[0].step_peak - 0.5 * saved
    assert packed.ranks[0].peak >= plain.ranks[0].step["parameters"]  # while it is loaded
    gathered = [sum(n * key[4] for key, n in r.ranks[0].step.items() if key[0] == "moved" and key[3] == "all_gather")
                for r in (plain, packed)]
    assert gathered[1] < 0.6 * gathered[0]  # the embedding and the head are gathered as they are
    one = [dry.report_of(dp_shard=1, lora_rank=4, compute_dtype="bfloat16", lora_nf4=nf4).ranks[0] for nf4 in (False, True)]
    assert one[0].activations == one[1].activations > 0 and one[1].step_peak < one[0].step_peak


@pytest.mark.parametrize("problem, degrees, flags, words", [
    ({}, dict(dp_shard=3), {}, "blocks.0.attn.wq.weight has 64 rows, which 3 ranks cannot share evenly"),
    ({}, dict(tp=2), {}, "blocks.0.attn.wo.weight has rows of 32 numbers on a rank, which are no whole blocks of 64"),
    (dict(dim=40), {}, {}, "blocks.0.attn.wq.weight has rows of 40 numbers on a rank, which are no whole blocks of 16"),
    (MOE, dict(dp_shard=16), {}, "blocks.0.moe.experts.w1 has 8 rows, which 16 ranks cannot share evenly"),
    (MOE | dict(head_dim=16), dict(tp=2), dict(etp=2), "experts.w2 has rows of 16 numbers on a rank, which are no whole"),
])
def test_what_ranks_cannot_pack_alike_is_refused(problem, degrees, flags, words):
    layout = one_layout(**NF4, **flags)
    layout.degrees |= degrees
    with torch.device("meta"):
        model = layouts.MODELS[type(config(**problem))](config(**problem))
    with pytest.raises(ValueError, match="^--lora_nf4: ") as error:
        check_model(model, layout, TP_STYLES)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("flags, words", [
    (dict(pp=2), "--lora_nf4 with --pp 2"), (dict(reshard_after_forward="never"), "--reshard_after_forward never"),
    (dict(cpu_offload=True), "--lora_nf4 with --cpu_offload is not"), (dict(lora_rank=0), "--lora_nf4 has no effect without"),
])
def test_what_4_bits_do_not_go_with_is_refused(flags, words):
    cfg = Flags(**NF4 | dict(dp_shard=2 // max(1, flags.get("pp", 1))) | flags)
    with pytest.raises(ValueError, match=words):
        layouts.check_layout(cfg, config(), seq_len=16, local_batch_size=2, global_batch_size=-1, device="cpu", world_size=2)


@pytest.mark.slow
def test_the_recipe_shows_that_a_layout_equals_one_process(tmp_path):
    model = ["--model_args", "n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64", "--seq_len", 32]
    flags = [*model, "--lora_rank", 4, "--lora_nf4", "--dp_shard", 2, "--check_parity", "--out", tmp_path / "run"]
    assert "check_parity: equal" in run(launch(1, layouts.__file__.replace("tests/layouts", "train_llama3"), *flags))
