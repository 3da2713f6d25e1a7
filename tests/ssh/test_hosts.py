"""`eyas host`: added, listed, trusted, probed, removed, against a real sshd."""

import json
import stat
import sys
from pathlib import Path

import pytest
from loopback import Server
from typer.testing import CliRunner

from eyas import config
from eyas.cli import app
from eyas.errors import UserError
from eyas.hosts import look, record
from eyas.hosts.ssh import Link


def eyas(*words: str, typed: str = "") -> str:
    done = CliRunner().invoke(app, list(words), input=typed)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_add_list_remove(server: Server) -> None:
    eyas("host", "add", "gpu-box", "--root", "/data/eyas", "--python", "~/venv/bin/python3", "--no-multiplex")
    host = record.load("gpu-box")
    assert (host.ssh, host.root, host.python, host.multiplex) == ("gpu-box", "/data/eyas", "~/venv/bin/python3", False)
    assert stat.S_IMODE(record.settings("gpu-box").stat().st_mode) == 0o600
    assert eyas("host", "list").split() == ["gpu-box", "gpu-box:/data/eyas", "not", "probed"]
    eyas("host", "remove", "gpu-box")
    assert eyas("host", "list") == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "x", "--root", "data"], "host x: root: write a whole path"),
        (["add", "x", "--root", "/d", "--ssh", "-oProxyCommand=touch x"], "host x: ssh: "),
        (["add", "../x", "--root", "/d"], "host ../x: name: "),
        (["probe", "nobody"], "nobody: no such host"),
        (["remove", "nobody"], "nobody: no such host"),
    ],
)
def test_what_is_wrong_is_said(server: Server, words: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        eyas("host", *words)
    assert str(error.value).startswith(says)


def test_trust_takes_an_unknown_and_a_changed_key(server: Server, root: Path) -> None:
    for known in (None, f"[127.0.0.1]:{server.port} ssh-ed25519 {'A' * 68}\nother ssh-ed25519 {'A' * 68}\n"):
        config = server.client(known=False, name="trusting")
        if known is not None:
            (server.folder / "known.trusting").write_text(known)
        else:
            (server.folder / "known.trusting").unlink(missing_ok=True)
        link = Link(server.host(root, config))
        with pytest.raises(UserError, match="host key"):
            link.first_call("shelf.hello")
        assert CliRunner().invoke(app, ["host", "trust", "box"], input="n\n").exit_code == 1
        with pytest.raises(UserError, match="shows another key than SHA256:x"):
            eyas("host", "trust", "box", "--fingerprint", "SHA256:x")
        with pytest.raises(UserError, match="host key"):
            link.first_call("shelf.hello")
        assert "SHA256:" in eyas("host", "trust", "box", typed="y\n")
        assert link.first_call("shelf.hello")
        link.close()
    assert "other ssh-ed25519" in (server.folder / "known.trusting").read_text()


def test_a_probe_is_kept_and_read_by_a_plan(server: Server, root: Path, tmp_path: Path) -> None:
    server.host(root)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"text_config": {"hidden_size": 7168, "num_hidden_layers": 61}}')
    text = eyas("host", "probe", "box", "--interpreter", "/nowhere/python", "--path", str(model))
    assert "/nowhere/python: no such interpreter" in text
    found = record.last_probe("box")
    assert found is not None
    assert abs(found["skew"]) < 5
    assert found["cores"] >= 1
    assert found["interpreters"][sys.executable]["packages"]["pydantic"]
    assert found["paths"][str(model)]["hidden_size"] == 7168
    assert found["root"]["free"] > 0
    assert not [path for path in root.iterdir() if path.is_file()]
    assert "probed" in eyas("host", "list")
    (tmp_path / "run.yaml").write_text(
        f"name: x\ntarget: {{model: {model}}}\nengine: {{kind: sglang}}\nserver: {{tp: 8, python: /nowhere/python}}\n"
        "answers: {max_new_tokens: 100000000}\n"
    )
    said = eyas("plan", "run.yaml", "--host", "box")
    assert "server.tp is 8, the host has 0 GPUs" in said or found["gpus"]
    assert "/nowhere/python has no sglang" in said
    assert "the states may take" in said


def test_what_a_host_lacks() -> None:
    asked = config.parse(
        {"name": "x", "target": {"model": "/m"}, "engine": {"kind": "sglang"}, "server": {"tp": 2, "python": "/s"}}, "x"
    )
    gpu = {"name": "G", "mib": 80000, "held_by": []}
    found = {
        "host": "box", "skew": 0.0, "gpus": [gpu, gpu], "root": {"path": "/r", "free": 10**12},
        "paths": {"/m": {"bytes": 10**11, "hidden_size": 4096}},
        "interpreters": {
            "/p": {"python": "3.11.2", "packages": dict.fromkeys((*look.CONTROL, *look.TRAIN), "1")},
            "/s": {"python": "3.12.0", "packages": {"sglang": "1"}}, "/old": {"python": "3.8.1", "packages": {}},
        },
    }  # fmt: skip
    assert look.missing(asked, found, "/p") == []
    assert look.missing(asked, found, None) == []
    assert look.missing(asked, found, "/old") == ["/old is Python 3.8.1, 3.11 is needed: name another one by --python"]
    held = {**gpu, "held_by": [{"pid": 7, "user": "ann"}]}
    assert look.missing(asked, {**found, "gpus": [held, gpu]}, "/p") == [
        "GPU 0 is held by process 7 of ann: wait for it, or ask"
    ]
    heavy = {"/m": {"bytes": 2 * 10**11, "hidden_size": 4096}}
    assert "do not fit into 2 GPUs" in look.missing(asked, {**found, "paths": heavy}, "/p")[0]
    assert "clock is +60 s off" in look.missing(asked, {**found, "skew": 60.0}, "/p")[0]
    assert json.dumps(found)
