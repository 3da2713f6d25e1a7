"""The code digest, on a package made for it."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.plan import code

FILES = {
    "__init__.py": "",
    "a/__init__.py": "",
    "a/entry.py": "from ..b import helper\ndef run(): ...\n",
    "b/__init__.py": "",
    "b/helper.py": "def f():\n    from fake.c import late\n",
    "c/__init__.py": "",
    "c/late.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fake.d\n",
    "d.py": "import os, json, nowhere\nfrom . import e\n",
    "e.py": "X = 1\n",
    "unrelated.py": "import fake.a.entry\n",
    "b/data/prompts.txt": "one\n",
    "b/__pycache__/x.pyc": "",
    "b/notes.md": "loose\n",
    "f/data/other.txt": "",
    "f/__init__.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes the package, with changes, and gives the digest of its entry."""
    monkeypatch.syspath_prepend(tmp_path)
    code._root.cache_clear()

    def write(**changes: str) -> str:
        for name, text in (FILES | changes).items():
            path = tmp_path / "fake" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return code.digest("fake.a.entry:run")

    return write


def test_the_closure(package: Callable[..., str]) -> None:
    package()
    assert set(code.closure("fake.a.entry")) == {
        "fake", "fake.a", "fake.a.entry", "fake.b", "fake.b.helper", "fake.c", "fake.c.late", "fake.d", "fake.e",
        "fake.b/data/prompts.txt",
    }  # fmt: skip
    assert "fake" not in sys.modules


@pytest.mark.parametrize(
    "name",
    ["a/entry.py", "b/helper.py", "c/late.py", "d.py", "e.py", "c/__init__.py", "__init__.py", "b/data/prompts.txt"],
)
def test_a_change_that_is_reached_counts(package: Callable[..., str], name: str) -> None:
    before = package()
    assert package(**{name: FILES[name] + "\n# changed\n"}) != before


@pytest.mark.parametrize(
    "name", ["unrelated.py", "f/__init__.py", "f/data/other.txt", "b/notes.md", "b/__pycache__/x.pyc"]
)
def test_a_change_that_is_not_reached_does_not(package: Callable[..., str], name: str) -> None:
    before = package()
    assert package(**{name: FILES[name] + "\n# changed\n"}) == before
    assert package() == before


def test_new_imports_are_followed(package: Callable[..., str]) -> None:
    package()
    package(**{"e.py": "from fake import unrelated\n"})
    assert "fake.unrelated" in code.closure("fake.a.entry")


def test_what_cannot_be_read_is_named(package: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"fake/e\.py line 2: not valid Python"):
        package(**{"e.py": "\ndef (\n"})
    with pytest.raises(UserError, match=r"fake\.none: no such module"):
        code.digest("fake.none:run")


def test_relative_imports() -> None:
    assert code.imports(b"from . import x", "p.q") == ("p.q", "p.q.x")
    assert code.imports(b"from .. import x", "p.q") == ("p", "p.x")
    assert code.imports(b"from .m import x", "p.q") == ("p.q.m", "p.q.m.x")
    assert code.imports(b"import a.b as c, d", "p") == ("a.b", "d")


def test_the_steps_do_not_reach_the_scheduler() -> None:
    found = code.closure("eyas.bench.verdict")
    assert "eyas.spec" in found
    assert not [name for name in found if name.startswith(("eyas.run", "eyas.plan", "eyas.ui", "eyas.cli"))]


def test_prompts_count_with_the_corpus() -> None:
    assert any(name.startswith("eyas.corpus/prompts/") for name in code.closure("eyas.corpus.builtin"))
