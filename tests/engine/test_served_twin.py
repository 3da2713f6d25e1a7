"""Twin and doctor on real SGLang: the nested Kimi K2.5 form from end to end, and a Llama server examined."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import configs
from eyas.config import Capture, Server
from eyas.engines.sglang import doctor, info, twin, twinmodel
from eyas.engines.sglang.server import Running
from eyas.progress import Silent

FLAGS = {"device": "cpu"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "twin"


@pytest.mark.long
def test_kimi_k25_is_captured_from_and_served_with_a_draft(sglang_python: str, folder: Path) -> None:
    """Other layers than the default ones, which DeepSeek-type models are told in another way than Llamas."""
    target = configs.info(configs.KIMI_K25, Path("/nowhere"))
    server = Server(python=sglang_python, args=FLAGS, staging_mib=64)
    found = twin.prove(target, server, folder, Silent(), dtype="float32", layers=(3, 31, 59))
    assert [(check.name, check.detail) for check in found.checks if check.passed is not True] == []
    assert list(found.layers) == ["hidden_states[3]", "hidden_states[5]", "hidden_states[6]", "last, normed"]
    assert found.exact
    assert max(found.layers.values()) < 5e-6
    assert found.checks[-1].name == "a draft is served, answers unchanged"


# Every served run is examined so too (test_served_run.py). Here nothing is left out for want of time.
@pytest.mark.long
def test_doctor_finds_nothing_wrong(
    serve: Callable[..., contextlib.AbstractContextManager[Running]], folder: Path
) -> None:
    target = configs.info(configs.LLAMA, Path("/nowhere"))
    made = twinmodel.make(target, folder, 1)
    with serve(made.info.folder, chunked_prefill_size=128, context_length=600) as running:
        said = info.read(running.endpoint.url)
        checks = list(doctor.check([running.endpoint], said, made.info, Capture(), Silent(), seconds=300.0))
    assert [(check.name, check.detail) for check in checks if check.passed is False] == []
    assert [check.name for check in checks if check.passed is None] == ["tensor-parallel ranks agree"]
    names = [check.name for check in checks]
    assert {"lengths 1, 2, 127, 128, 129", "chunk boundaries 127, 128, 129, 256", "alone and among 64"} <= set(names)
