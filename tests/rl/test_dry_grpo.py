"""grpo.py --dry_run, against tools/reports/dry_grpo.py: rollouts and updates of real processes take the
memory that it says."""

import sys
from dataclasses import replace

import pytest
import torch
from dry import Settled
from policy import ENV, SMALL
from pool import pool
from programs import REPO, run_program

import grpo
from grpo import Config, Trainer
from rl.decoding import rollout
from rl.rollouts import whole_weights
from rl.sample import Sample
from tools.reports import dryrun
from tools.reports.dry_grpo import observe_phases

FLAGS = dict(
    env=str(REPO / "tests/env_counting.py"),
    model_args=SMALL,
    prompts_per_step=8,
    group_size=4,
    max_new_tokens=20,
    seq_len=48,
    local_batch_size=4,
    compute_dtype="float32",
    device="cpu",
    eval_every=0,
)


def config(**flags) -> Config:
    return Config(**{name: value for name, value in (FLAGS | flags).items() if value is not None})


def really(flags: dict, out: str) -> tuple:
    """(bytes of a rank's parameters, of its optimizer, most bytes made in a rollout, and in an
    update), of samples that are as long as they can be."""
    cfg = config(**flags, out=out)
    connect = lambda layout, cfg, *args, **kwargs: replace(layout, compute_dtype=torch.float32)  # noqa: E731
    [model], _, layout = dryrun.build(grpo.main, cfg, connect)
    trainer, watch = Trainer(cfg, layout, model), Settled(layout)
    n = cfg.prompts_per_step // layout.data_ranks
    prompts = [[1] * (cfg.seq_len - cfg.max_new_tokens)] * n
    noise = torch.rand(
        n, cfg.group_size, cfg.max_new_tokens, generator=torch.Generator().manual_seed(0)
    )
    if layout.pp == 1:
        with watch, whole_weights(model):
            rollout(
                model,
                prompts,
                noise,
                1.0,
                [],
                max_len=cfg.seq_len,
                rows=cfg.rollout_rows,
                tp_mesh=layout.mesh["tp"] if layout.tp > 1 else None,
            )
    rolled, numbers = watch.take_peak(), [1.0] * cfg.max_new_tokens
    sample = Sample(
        prompt=prompts[0],
        ids=[2] * cfg.max_new_tokens,
        logprobs=numbers,
        mask=numbers,
        advantage=1.0,
    )
    # two forwards
    some = [replace(sample) for _ in range(2 * cfg.local_batch_size * layout.data_ranks)]
    with watch:
        trainer.train_on(some)
        trained = watch.take_peak()
        trainer.optim_step(1e-3)
    state = dryrun.optimizer_state([trainer.optimizer])
    return (
        dryrun.size_of(model.parameters()),
        state,
        rolled,
        max(trained + state, watch.take_peak()),
    )


@pytest.mark.parametrize(
    "processes, flags",
    [
        (1, {}),
        (2, dict(dp_shard=2)),
        (2, dict(tp=2, dp_shard=1)),
        (1, dict(ac="full", local_batch_size=2)),
        (1, dict(rollout_rows=16)),
        (2, dict(pp=2, engine="x", seq_len=96)),
    ],
    ids=str,
)
def test_memory_is_that_of_real_processes(processes, flags, tmp_path):
    _, _, (parameters, reference, state), phases = observe_phases(grpo.main, config(**flags))
    ranks = pool(processes).run(really, flags, str(tmp_path))
    held, kept, rolled, _ = ranks[0]
    assert (parameters, state, reference) == (held, kept, 0)
    updates = [phase.made for name, phase in phases.items() if "update" in name]
    assert updates == pytest.approx([trained for *_, trained in ranks[: len(updates)]], rel=0.05)
    assert "pp" in flags or phases["rollout"].made == pytest.approx(rolled, rel=0.01)


def test_a_packed_row_counts_as_its_tokens():
    """Without its mask of documents, which a GPU's kernel makes as it goes."""
    *_, rows = observe_phases(grpo.main, config(local_batch_size=2))
    *_, packed = observe_phases(grpo.main, config(local_batch_size=None, pack_tokens=96))
    assert packed["update"].made == pytest.approx(rows["update"].made, rel=0.01)


def test_generators_references_and_engines():
    """A generator holds the whole model and the rows of its share of the prompts; with an engine
    nobody here samples."""
    usual = observe_phases(grpo.main, config())
    both = observe_phases(grpo.main, config(dp_shard=2, gen_ranks=2, kl_coef=0.1))
    (_, n_params, _, phases), (whole, _, _) = both, usual[2]
    assert both[2][:2] == (whole // 2, whole // 2)
    assert phases["update"].held == whole
    assert list(phases) == ["update", "generator"]
    assert phases["generator"].held == 4 * n_params == whole
    # k, v, layers ... keys
    assert phases["generator"].cache * 2 == usual[3]["rollout"].cache == 2 * 2 * 2 * 8 * 4 * 32 * 64
    piped = observe_phases(grpo.main, config(pp=2, gen_ranks=2, batch_invariant=True))
    assert list(piped[3]) == ["update, stage 0", "update, stage 1", "generator"]
    assert piped[1] == n_params
    assert piped[3]["generator"] == phases["generator"]
    remote = observe_phases(grpo.main, config(engine="http://127.0.0.1:1", engine_seed=True))
    assert list(remote[3]) == ["update"]


def test_the_command(tmp_path):
    def run(*argv):
        command = [sys.executable, REPO / "grpo.py", *map(str, argv), "--out", tmp_path / "run"]
        return run_program(command, env=ENV, cwd=tmp_path, timeout=300)

    done = run("--dry_run", "--dp_shard", 4, "--tp", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists(), done.stderr
    assert "dp_shard 4 x tp 2" in done.stdout
    assert "update: fsdp reduce_scatter" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["update", "rollout"]
    for argv, said in (
        (["--plot"], "--plot draws the curves"),
        (["--machine", "H100"], "unknown flag --machine"),
    ):
        done = run("--dry_run", *argv)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
