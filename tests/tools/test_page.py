"""--explain --html: the page shows the same parts as real processes hold; and a real browser shows
the page (slow).

`PYTHONPATH=.:tests python tests/tools/test_page.py` makes the screenshots in docs/ from the pages
of the slow test.
"""

import html.parser
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dry import MOE, REPO, config, recipe_of, run
from layouts import layouts_of
from pool import pool
from tables import as_parameters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import parallel
from distributed.layout import local_slice, local_tensor
from tools.reports import dryrun
from tools.reports.dryrun import make_report
from tools.reports.explain import count_block
from tools.reports.page import list_ticks, make_page
from tools.reports.parts import held_part, place_of, ranges, shown_parameters, tokens_of
from tools.reports.schedule import duration, simulate

pytestmark = pytest.mark.slow  # make test has no room for it

# ---------------------------------------------------------------- what a rank holds


def parts(t) -> list:
    return [(a, a + n) for n, a in zip(*local_slice(t), strict=True)]


def really_held(recipe: str, flags: dict) -> dict:
    """On a gloo process: after a step, the parts of weight, gradient and optimizer state, and the
    rank's tokens."""
    cfg = config(recipe, flags)
    _clear_sharding_prop_cache()
    stages, optimizers, layout = dryrun.build(
        importlib.import_module(recipe).main, cfg, lambda layout, *args, **kwargs: layout
    )
    shape = layout.accumulation, layout.local_batch_size, cfg.seq_len
    tokens = torch.arange(math.prod(shape)).view(shape) % stages[0].config.vocab_size
    batch = SimpleNamespace(
        tokens=tokens,
        labels=tokens,
        positions=torch.arange(cfg.seq_len).expand(shape),
        doc_ids=None,
    )
    widths = []
    block = next(iter(stages[0].blocks.values()))
    block.register_forward_pre_hook(lambda block, args: widths.append(args[0].shape[1]))
    parallel.forward_backward(stages, batch, layout)
    for optimizer in optimizers:
        optimizer.step()
    state = {p: list(s.values()) for optimizer in optimizers for p, s in optimizer.state.items()}
    held = {}
    for name, p in shown_parameters(stages).items():
        held[name] = [parts(t) for t in (p, p.grad, *(t for t in state[p] if t.dim()))]
    local = {name: list(local_tensor(p).shape) for name, p in shown_parameters(stages).items()}
    positions = ranges(parallel.inputs(stages[0], batch, 0, layout)["positions"][0])
    return dict(
        held=held, local=local, data_rank=layout.data_rank, inside=positions, width=widths[0]
    )


@pytest.mark.parametrize("row", as_parameters(layouts_of("page")))
def test_the_page_knows_what_a_real_rank_holds(row):
    """Weight, gradient and both of AdamW's moments of each rank, the positions, and their number
    between blocks."""
    recipe, flags = recipe_of(dict(dp_shard=1) | row[1], row[2])
    real = pool(4).run(really_held, recipe, flags)
    cfg = config(recipe, flags)
    main = importlib.import_module(recipe).main
    pp = flags.get("pp", 1)
    for rank in range(4):
        # the first rank of a pipeline rank: enough to compute the parts of the others
        if rank % (4 // pp) == 0:
            with dryrun.dry_world(main, cfg, rank // (4 // pp)) as (stages, _, layout):
                pass
        parameters = shown_parameters(stages)
        place = place_of(layout, rank)
        said = {name: [held_part(p, place)] * 4 for name, p in parameters.items()}
        tokens = tokens_of(layout, place, cfg.seq_len)
        assert said == real[rank]["held"]
        assert {name: [b - a for a, b in where[0]] for name, where in said.items()} == real[rank][
            "local"
        ]
        share = layout.global_batch_size // layout.data_ranks
        assert tokens["sequences"] == (
            real[rank]["data_rank"] * share,
            (real[rank]["data_rank"] + 1) * share,
        )
        assert tokens["inside"] == real[rank]["inside"]
        assert sum(b - a for a, b in tokens["between"]) == real[rank]["width"]


# ---------------------------------------------------------------- the page


class Page(html.parser.HTMLParser):
    """Parses a page: attributes, texts and the data. Fails if tags do not close in order."""

    EMPTY = {"meta", "input", "rect", "line", "path"}

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.texts = []
        self.feed(text)
        assert not self.open, self.open
        self.data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)

    def values(self, name: str) -> set:
        return {attrs[name] for _, attrs in self.tags if name in attrs}


def page_of(recipe: str, flags: dict, counted=True) -> tuple[str, Page, object]:
    main = importlib.import_module(recipe).main
    cfg = config(recipe, dict(dp_shard=1) | flags)
    report = make_report(main, cfg)
    text = make_page(
        cfg, report, count_block(main, cfg) if counted else None, "python the <command> & more"
    )
    return text, Page(text), report


@pytest.mark.parametrize(
    "recipe, flags",
    [
        ("train_llama3", {}),
        ("train_llama3", dict(dp_shard=2, cp=2, tp=2)),
        ("train_llama3", dict(pp=4, dp_shard=2, local_batch_size=8)),
        ("train_llama3", dict(pp=2, tp=2, pp_schedule="ZBVZeroBubble", local_batch_size=8)),
        ("train_qwen3", dict(dp_shard=4, ep=4, model_args=MOE)),
    ],
    ids=str,
)
def test_the_page(recipe, flags):
    text, page, report = page_of(recipe, flags, counted=flags.get("pp") != 2)
    layout = report.layout
    # nothing is downloaded
    assert "://" not in text
    assert not page.values("src") | page.values("href")
    ranks = {str(r) for r in range(layout.world_size)}
    assert page.values("data-rank") == ranks
    assert {f"rank{r}" for r in ranks} <= page.values("id")
    assert "python the <command> & more" in page.texts
    assert {
        "here while the block runs",
        "here from the first forward to the last backward of a step",
    } & set(page.texts) == {
        "here while the block runs"
        if layout.pp == 1
        else "here from the first forward to the last backward of a step"
    }
    for axis, groups in page.data["groups"].items():
        assert sorted(r for group in groups for r in group) == list(range(layout.world_size)), axis
    assert any(a.get("id") == "schedule" and "hidden" in a for _, a in page.tags) == (
        layout.pp == 1
    )
    assert len(page.data["ticks"]) == duration(simulate(report.rows))
    # a section for each rank with a box for each parameter on any rank, and the batch; all ranks
    # have all tokens
    tensors = {name for rank in report.ranks for name in shown_parameters(rank.stages)}
    names = {name.removesuffix(".weight") for name in tensors}
    assert names <= set(page.texts)
    areas = {}
    for look in ("whole", "kept", "gathered", "token"):
        areas[look] = [
            float(a["width"]) * float(a["height"])
            for tag, a in page.tags
            if tag == "rect" and a["class"] == look
        ]
    n = layout.world_size
    held = sum(len(shown_parameters(rank.stages)) for rank in report.ranks)
    assert len(areas["whole"]) == n * (len(tensors) + 1 + 2)  # 2 in the legends
    assert len(areas["kept"]) == len(areas["gathered"]) == n * held // layout.pp + n
    # without legends
    kept, gathered, token = (
        sum(areas[look]) - n * 14 * 14 for look in ("kept", "gathered", "token")
    )
    assert token == pytest.approx(
        560 * min(112, 14 * layout.global_batch_size) * layout.pp, rel=0.02
    )
    if layout.cp > 1:  # gathered over fsdp 4, 8 ranks have each number 4 times as often
        assert gathered == pytest.approx(4 * kept, rel=0.02)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "Interleaved1F1B"])
def test_the_ticks_send_what_the_step_sends(name):
    """As many sends as in the dry run, and every unit of work is shown for as many ticks as the
    schedule says."""
    report = make_report(
        importlib.import_module("train_llama3").main,
        config("train_llama3", dict(pp=2, dp_shard=1, local_batch_size=4, pp_schedule=name)),
    )
    times = simulate(report.rows)
    found = list_ticks(
        times, {i: r for r, rank in enumerate(report.ranks) for i in rank.ids}, "1 B"
    )
    for r, rank in enumerate(report.ranks):
        counted = sum(
            n for key, n in rank.step.items() if key[0] == "moved" and key[2:4] == ("pp", "send")
        )
        assert (
            sum(text.startswith(f"pp {r} sends") for tick in found for text in tick["sent"])
            == counted
            > 0
        )
        work = sum(end - start for start, end, *_ in times[r])
        assert sum(tick["now"][r] != "waits" for tick in found) == work


# ---------------------------------------------------------------- in a browser

BROWSER = next(
    filter(
        None,
        map(
            shutil.which,
            filter(
                None,
                (
                    os.environ.get("CHROME"),
                    "chromium",
                    "chromium-browser",
                    "google-chrome",
                    "chrome",
                ),
            ),
        ),
    ),
    None,
)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
]
# name: recipe and flags, state in the address, words on the page, height of the screenshot
PAGES = {
    "dense": (
        "train_llama3.py --dp_shard 2 --cp 2 --tp 2",
        "#rank=3",
        ["Rank 3 holds", "tp with 2", "rows 160-191", "cp fsdp"],
        1900,
    ),
    "pipeline": (
        "train_llama3.py --pp 4 --dp_shard 2 --global_batch_size 16 --local_batch_size 8",
        "#rank=3&tick=9",
        ["layers 1-2", "Tick 9 of 32", "backward of micro-batch 0", "pp 1 sends the gradients of"],
        1780,
    ),
    "experts": (
        "train_qwen3.py --flavor debug_moe --dp_shard 4 --ep 4",
        "#rank=2",
        ["Rank 2 holds", "experts 4-5", "ep with 0, 1, 3"],
        1900,
    ),
}
# A reader's actions, as events of the browser; the script writes the visible texts into the title.
READER = """<script>addEventListener("load", () => {
  const cell = r => document.querySelector('[data-rank="' + r + '"]'), seen = [], see = () => seen.push(
    by("who").textContent + " | " + document.activeElement.dataset.rank + " | " + by("tick").textContent);
  cell(2).dispatchEvent(new MouseEvent("mouseover", {bubbles: true})); see();
  cell(1).focus(); see();
  cell(1).dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true})); see();
  by("next").click(); see(); by("previous").click(); see();
  by("slider").value = 5; by("slider").dispatchEvent(new Event("input")); see();
  const sizes = [...document.querySelectorAll("body *")].map(e => parseFloat(getComputedStyle(e).fontSize));
  document.title = seen.join("; ") + "; " + Math.min(...sizes) + " " + (document.body.scrollWidth > 500) + "; " + location.hash;
})</script></body>"""


def browse(folder: Path, page: Path, state: str, *options) -> str:
    command = [
        BROWSER,
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        *options,
        f"{page.as_uri()}{state}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(name: str, folder: Path) -> Path:
    page = folder / f"{name}.html"
    done = run(*PAGES[name][0].split(), "--explain", "--html", page)
    assert done.returncode == 0, done.stderr
    assert f"{page}: what every rank holds" in done.stdout, done.stderr
    return page


def screenshot(name: str, folder: Path, page: Path, target: Path) -> None:
    browse(
        folder,
        page,
        PAGES[name][1],
        f"--window-size=1000,{PAGES[name][3]}",
        f"--screenshot={target}",
    )


@pytest.mark.skipif(
    BROWSER is None, reason="needs a browser: chromium, google-chrome, or CHROME=path of one"
)
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_shows_the_page(name, tmp_path):
    page = make(name, tmp_path)
    _, state, words, _ = PAGES[name]
    shown = browse(tmp_path, page, state, "--dump-dom")
    dom = re.sub(r"<script.*?</script>|<section[^>]* hidden.*?</section>", "", shown, flags=re.S)
    assert not [word for word in words if word not in dom]
    # a reader points at rank 2, goes to rank 1 with the keyboard and on with an arrow, and steps
    # through the schedule
    page.write_text(page.read_text().replace("</body>", READER))
    dom = browse(tmp_path, page, "", "--window-size=390,900", "--dump-dom")
    *seen, sizes, address = (
        re.search(r"<title>(.*?)</title>", dom, re.S)[1].replace("&amp;", "&").split("; ")
    )
    assert sizes == "11 false"  # pixels of the smallest text; pictures scroll, the page does not
    if name == "dense":
        inner = 4
    else:
        inner = 1
    after = 1 + inner
    assert seen[0].startswith("Rank 2 holds | undefined")
    assert seen[1].startswith("Rank 1 holds | 1")
    assert seen[2].startswith(f"Rank {after} holds | {after}")
    last = 32 if name == "pipeline" else 2  # a forward and a backward, not shown
    assert [text.split(" | ")[2] for text in seen] == [
        f"Tick {t} of {last}" for t in (0, 0, 0, 1, 0, min(5, last))
    ]
    assert address == f"#rank={after}&tick={min(5, last)}"
    screenshot(name, tmp_path, page, tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    for each in sys.argv[1:] or PAGES:
        import tempfile

        with tempfile.TemporaryDirectory() as temporary:
            shown = make(each, Path(temporary))
            text = shown.read_text().replace(str(shown), "out.html")
            shown.write_text(text)
            screenshot(each, Path(temporary), shown, REPO / "docs" / f"page_{each}.png")
