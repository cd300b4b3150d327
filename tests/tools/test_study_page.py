"""The page of a study: headings, tables and diffs as HTML; a copied model as a diff of what changed."""

from html.parser import HTMLParser
from pathlib import Path

from tools.study.page import page_of
from tools.study.report import diffs_of
from tools.study.variants import sources_of

REPO = Path(__file__).parents[2]


class Tags(HTMLParser):
    """Counts tags, and complains about one that is not closed."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def copy_with_changes(folder: Path) -> tuple[dict, dict]:
    """(baseline, variant): a recipe with its model, and copies in which two lines differ."""
    (folder / "models").mkdir()
    for name in ("models/llama3.py", "train_llama3.py"):
        (folder / name).write_text((REPO / name).read_text())
    model = (REPO / "models/llama3.py").read_text()
    changed = model.replace("class Llama3(", "class Mine(").replace("\n\n\n", "\n\n\nX = 1\n", 1)
    (folder / "models/mine.py").write_text(changed)
    recipe = (REPO / "train_llama3.py").read_text()
    recipe = recipe.replace("from models.llama3 import", "from models.mine import")
    (folder / "train_mine.py").write_text(recipe)
    made = []
    for name in ("train_llama3.py", "train_mine.py"):
        file = folder / name
        made.append({"file": str(file), "files": sources_of(file)})
    return made[0], made[1]


def test_a_copied_model_is_shown_by_what_changed(tmp_path):
    base, variant = copy_with_changes(tmp_path)
    diffs = "\n".join(diffs_of(base, variant))
    assert "--- models/llama3.py" in diffs and "+++ models/mine.py" in diffs
    added = [line for line in diffs.splitlines() if line.startswith("+") and line[:3] != "+++"]
    removed = [line for line in diffs.splitlines() if line.startswith("-") and line[:3] != "---"]
    assert "+X = 1" in added and "-from models.llama3 import FLAVORS, Llama3" in removed
    assert len(added) == 3 and len(removed) == 2, diffs


def test_a_file_without_an_original_is_all_new(tmp_path):
    base, variant = copy_with_changes(tmp_path)
    (tmp_path / "models/mine.py").write_text("Y = 1\nZ = 2\n")
    variant["files"] = sources_of(tmp_path / "train_mine.py")
    diffs = "\n".join(diffs_of(base, variant))
    assert "--- /dev/null" in diffs and "+Z = 2" in diffs


def test_the_page_is_html(tmp_path):
    table = "| variant | loss |\n| ------- | ---- |\n| a<b     | 1.5  |"
    diff = "```diff\n--- a\n+++ b\n-old <1>\n+new\n```"
    page = page_of(
        ["# loss of 2", "a beats b", table, "run: `python x`", diff], tmp_path / "no.png"
    )
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert tags.seen.count("tr") == 2 and tags.seen.count("td") == 2 and "h1" in tags.seen
    assert "<td>a&lt;b</td>" in page and "<code>python x</code>" in page
    assert '<span class="old">-old &lt;1&gt;</span>' in page
    assert "| " not in page and "```" not in page
