"""Every command that the documentation shows is run: `make` targets exist, `eyas` commands work in a sandbox."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(
    {
        line.strip()
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    }
)
SMALL = [
    "prompts.train_limit=24",
    "prompts.heldout_limit=4",
    "answers.max_new_tokens=12",
    "draft.vocab_size=100",
    "train.batch_tokens=512",
    "train.epochs=1.0",
    "train.ttt_steps=2",
    "decode.timing_prompts=1",
]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory, tiny_llama):
    """A folder with the recipes, in which a small run of each has been made."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    eyas(folder, tiny_llama, ["run", "recipes/own-model.yaml", "target.model=/models/my-model"])
    return folder


def eyas(folder: Path, model: Path, arguments: list[str]) -> str:
    arguments = [a.replace("/models/my-model", str(model)) for a in arguments]
    if arguments[0] in ("run", "plan"):
        arguments += SMALL
    command = [sys.executable, "-m", "eyas", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_commands():
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS
    assert any(command.startswith("eyas run") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, sandbox, tiny_llama):
    program, *arguments = shlex.split(command)
    if program == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
    else:
        assert program == "eyas"
        eyas(sandbox, tiny_llama, arguments)


def test_every_path_that_the_tree_names_exists():
    tree = re.search(r"```\nsrc/eyas/\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree
    for line in tree.group(1).splitlines():
        indent = len(line) - len(line.lstrip())
        base = ROOT / "src" / "eyas" if indent else ROOT
        if indent == 4:
            base = base / "engines"
        for name in re.match(r"\s*((?:[\w.]+/?\s{1,2})+)", line + "  ").group(1).split():
            assert (base / name).exists(), name


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
