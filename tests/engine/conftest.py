"""Real SGLang on the processor, started once for many tests."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.config import Server
from eyas.engines.sglang.server import Running, started
from eyas.progress import Silent

INTERPRETER = Path(os.environ.get("EYAS_SGLANG", Path(__file__).parents[2] / ".venv-sglang")) / "bin" / "python"


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang: `make sglang-cpu` makes it."""
    if not INTERPRETER.exists():
        pytest.fail(f"{INTERPRETER}: no SGLang there; run `make sglang-cpu`, or set EYAS_SGLANG to its environment")
    return str(INTERPRETER)


@pytest.fixture(scope="session")
def serve(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """`serve(model, **args)`: a float32 server with the capture plugin; `args` are flags with underscores.

    Idle it sleeps: otherwise its scheduler keeps a whole core busy while something else is tested.
    """

    @contextlib.contextmanager
    def start(model: Path, layers: tuple[int, int, int] | None = None, **args: Any) -> Iterator[Running]:
        flags = {"device": "cpu", "max-running-requests": 64, "skip-tokenizer-init": True, "sleep-on-idle": True}
        flags |= {name.replace("_", "-"): value for name, value in args.items()}
        config = Server(python=sglang_python, args=flags, staging_mib=64)
        with started(config, model, "float32", tmp_path_factory.mktemp("server"), Silent(), layers=layers) as running:
            yield running

    return start
