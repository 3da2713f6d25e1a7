"""Every command that the documentation shows is run: `make` targets exist, `eyas` commands work in a sandbox.

Servers are played there: `python3 -m sglang.launch_server` of tests/playedserver, a tiny model with a faultless plugin.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from eyas import config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = [
    "prompts.train_limit=24",
    "prompts.heldout_limit=4",
    "answers.max_new_tokens=12",
    "draft.vocab_size=100",
    "train.batch_tokens=512",
    "train.epochs=1.0",
    "train.ttt_steps=2",
    "decode.timing_prompts=1",
    "bench.prompts=3",
    "bench.rounds=2",
    "bench.max_new_tokens=8",
]


def blocks(kind: str, page: Path) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def command_lines() -> list[str]:
    """In the order in which somebody would type them: later ones may need what earlier ones made."""
    lines = [line.strip() for page in PAGES for block in blocks("bash", page) for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


COMMANDS = command_lines()
# What only repeats in another form what a command before them shows; nothing that comes after needs them.
LONG = ["eyas doctor my-model.yaml --twin-only", "eyas run existing.yaml"]
YAML = [(page.name, block) for page in PAGES for block in blocks("yaml", page)]


class Sandbox:
    """A folder in which commands are run, with the files that the pages show and places that they name."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.done = folder, set()
        self.server = None
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        shutil.copytree(model, folder / "my-model")
        (folder / "tmp").mkdir()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = str(one.getsockname()[1])
        self.places = {
            "/models/my-model": str(folder / "my-model"),
            "/srv/eyas-plugin": str(folder / "eyas-plugin"),
            "30000": port,
        }
        search = [ROOT / "tests" / "playedserver", ROOT / "tests"]
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "TMPDIR": str(folder / "tmp"),
        }
        for name, kind, mark in [("launch.sh", "sh", "#!/"), ("existing.yaml", "yaml", "name: existing")]:
            found = [b for page in PAGES for b in blocks(kind, page) if b.startswith(mark)]
            (folder / name).write_text(self.placed(found[0]))

    def placed(self, text: str) -> str:
        """Text of a page with the places that there are here."""
        for shown, here in self.places.items():
            text = text.replace(shown, here)
        return text

    def run(self, command: str) -> None:
        """Run a command, before it those that come before it."""
        for earlier in COMMANDS[: COMMANDS.index(command) + 1]:
            if earlier not in self.done and (earlier not in LONG or earlier == command):
                self.done.add(earlier)
                self._run(earlier)

    def _run(self, command: str) -> None:
        program, *arguments = shlex.split(self.placed(command))
        if program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
            return
        assert program == "eyas"
        arguments += SMALL if arguments[0] in ("run", "plan") else []
        line = [sys.executable, "-m", "eyas", *arguments]
        done = subprocess.run(line, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        if arguments[0] == "plugin":
            self.serve([line for line in done.stdout.splitlines() if line.startswith("export ")])

    def serve(self, exports: list[str]) -> None:
        """Start the server that the page has its reader start, with the lines that `eyas plugin` printed."""
        port = self.places["30000"]
        model = self.places["/models/my-model"]
        start = f"exec python3 -m sglang.launch_server --model-path {shlex.quote(model)} --port {port}"
        self.server = subprocess.Popen(["sh", "-c", "\n".join([*exports, start])], cwd=self.folder, env=self.env)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", int(port))) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError("the played server does not listen")

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory, tiny_llama):
    made = Sandbox(tmp_path_factory.mktemp("docs"), tiny_llama)
    yield made
    made.close()


def test_there_are_commands():
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS
    assert set(LONG) < set(COMMANDS)
    for subcommand in ("run", "plan", "status", "report", "replay", "init", "doctor", "plugin", "bench"):
        assert any(command.startswith(f"eyas {subcommand} ") for command in COMMANDS), subcommand


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=[pytest.mark.long] if line in LONG else []) for line in COMMANDS]
)
def test_command(command, sandbox):
    sandbox.run(command)


@pytest.mark.parametrize(("page", "text"), YAML)
def test_every_part_of_a_run_file_is_one(page, text):
    config.parse({"name": "x", "target": {"model": "x"}, **yaml.safe_load(text)}, page)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads(recipe):
    assert config.load(recipe).name == recipe.stem


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
