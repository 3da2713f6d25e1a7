"""The commands of docs/ssh.md, in their order, against the sshd on loopback; the run's steps are toys."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import Server

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """The lines of the page that need a host."""
    text = (ROOT / "docs" / "ssh.md").read_text()
    return [line for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_the_pages_commands(server: Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.setenv("EYAS_TOYS", "{}")
    (server.folder / "known.page").unlink(missing_ok=True)
    here = {"ann@gpu-box": "box", "/data/eyas": str(root), "/opt/eyas/bin/python": sys.executable}
    said = {}
    for line in commands():
        words = [here.get(word, word) for word in shlex.split(line)]
        assert words[0] == "eyas", line
        if words[1:3] == ["host", "add"]:
            words += ["--passing", "--ssh-config", str(server.client(known=False, name="page"))]
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("laptop.py")), *words[1:]],
            input="y\n", capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said[" ".join(words[1:3])] = done.stdout + done.stderr
    assert "SHA256:" in said["host trust"]
    assert "Host gpu-box, probed 20" in said["plan recipes/kimi-k2.5-8gpu.yaml"]
    assert "one: finished" in said["run recipes/kimi-k2.5-8gpu.yaml"]
    assert "one: finished" in said["watch kimi-k2.5-8gpu"]
    assert "one           finished" in said["status kimi-k2.5-8gpu"]
    assert "nothing was running" in said["stop kimi-k2.5-8gpu"]
    assert (tmp_path / "runs" / "kimi-k2.5-8gpu@gpu-box" / "verdict.json").is_file()
