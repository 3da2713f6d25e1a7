"""Shared by all tests. Its place makes tests/toys.py and tests/toyrun.py importable."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import tiny

# Threads of torch that wait for each other sleep instead of spinning: two on a processor that has other work too are
# several times as fast. Before torch is loaded, and for the child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# No test adds to the durations of the user who runs it. Before anything reads it, and for the child processes.
_state = tempfile.TemporaryDirectory(prefix="eyas-state-")
os.environ["XDG_STATE_HOME"] = _state.name

# Machines that do other work meanwhile are slow now and then.
hypothesis.settings.register_profile("eyas", deadline=None)
hypothesis.settings.load_profile("eyas")


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests compute with one thread, their steps too: tiny models are several times slower with more."""
    if request.path.parent.name == "unit" and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        if "eyas.engines.device" in sys.modules:
            monkeypatch.setattr("eyas.engines.device.usable_cores", lambda: 1)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes can import tests/toys.py too; no report is built; the executor looks often."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr("eyas.run.session.report", lambda folder, strict=True: [])
    monkeypatch.setattr("eyas.run.executor.TICK_SECONDS", 0.02)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`tmpfs(size)`: a real file system of that size. Only root may mount one; elsewhere the test is skipped."""
    folder = tmp_path / "tmpfs"

    def mount(size: str) -> Path:
        folder.mkdir()
        if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]).returncode:
            pytest.skip("needs root and tmpfs")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, fetched into the user's own cache."""
    from eyas.engines.fetch import fetch
    from eyas.progress import Silent

    return fetch("smollm2-135m-instruct", Silent())


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny(architecture="llama", layers=8, tied=True, seed=0)`: the folder of a random model; see tests/tiny.py.

    Each is made once a session and shared: copy it before changing it.
    """
    made: dict[tuple[str, int, bool, int], Path] = {}

    def make(architecture: str = "llama", layers: int = 8, tied: bool = True, seed: int = 0) -> Path:
        key = (architecture, layers, tied, seed)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{architecture}-{layers}-{seed}-")
            tiny.write(made[key], *key)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny: Callable[..., Path]) -> Path:
    """A random Llama of 8 layers; read-only."""
    return make_tiny()
