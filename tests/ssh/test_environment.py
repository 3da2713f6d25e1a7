"""The interpreter there: the user's own as it is, or an environment made from a lock and wheels, once."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from loopback import Server

from eyas.errors import UserError
from eyas.hosts import environment, ship
from eyas.hosts.remote import Watching
from eyas.hosts.ssh import Link


def wheel(folder: Path, name: str) -> None:
    """A wheel with one empty module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
        file.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))


def test_the_lock_names_what_is_here() -> None:
    lines = environment.lock().splitlines()
    assert any(line.startswith("pydantic==") for line in lines)
    assert any(line.startswith("torch==") and "+" not in line for line in lines)
    assert not any(line.startswith(("pytest", "ruff")) for line in lines)
    assert hashlib.sha256(environment.lock().encode()).digest() == hashlib.sha256(environment.lock().encode()).digest()


def test_the_users_interpreter_is_asked_for_what_it_lacks(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    there = link.call("shelf.hello")
    assert environment.ready(link, there, "", print, lambda link, job: 1) == there["executable"]
    monkeypatch.setattr(environment, "MODULES", ("yaml", "no_such_module"))
    with pytest.raises(UserError, match=r"lacks no_such_module: install them there, or leave out --python"):
        environment.ready(link, there, "", print, lambda link, job: 1)
    with pytest.raises(UserError, match=r"is Python 3.8.10, 3.11 is needed"):
        environment.ready(link, {**there, "python": [3, 8, 10]}, "", print, lambda link, job: 1)


@pytest.mark.long
def test_an_environment_is_made_once(
    server: Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "wheels", "toypackage")
    link = Link(server.host(root, python=None, wheels=str(tmp_path / "wheels")))
    monkeypatch.setattr(environment, "lock", lambda: "toypackage==1.0\n")
    monkeypatch.setattr(environment, "MODULES", ("toypackage",))
    there = link.call("shelf.hello")
    if tuple(there["python"]) < (3, 11):
        pytest.skip("python3 of this machine is too old")
    code = ship.code()
    ship.send_code(link, code)

    def make() -> str:
        return environment.ready(
            link, there, code.digest, print, lambda link, job: Watching(link, job, None).until_end(print)
        )

    python = Path(make())
    assert python.is_relative_to(root / "env")
    assert (python.parents[1] / "ready.json").stat().st_mode & 0o777 == 0o600
    made = capfd.readouterr().out
    assert "toypackage" in made
    assert make() == str(python)
    assert capfd.readouterr().out == ""
    (python.parents[1] / "ready.json").unlink()  # As if it had been killed half-way.
    assert make() == str(python)
    monkeypatch.setattr(environment, "lock", lambda: "nowhere==1.0\n")
    with pytest.raises(UserError, match="the environment could not be made"):
        make()
    assert "nowhere" in capfd.readouterr().out
