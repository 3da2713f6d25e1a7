"""Doctor finds what servers are known to do to captured states, and is content with one that does it right."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import capturing
from eyas.config import Capture, parse
from eyas.engines.sglang import doctor
from eyas.engines.sglang.checks import Check, Tally, collect, random_ids
from eyas.engines.target import TargetInfo, inspect
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.spec import StepSpec

SECONDS = 300.0
"""More than enough, however busy the machine is: what there is no time for is another test's."""


def examine(server: capturing.Capturing, model: Path, **changed: Any) -> list[Check]:
    info = dataclasses.replace(server.info, **changed)
    with server as endpoint:
        return list(doctor.check([endpoint], info, target(model), Capture(), Silent(), SECONDS))


def target(model: Path) -> TargetInfo:
    return inspect(str(model), Silent())


def failed(checks: list[Check]) -> list[str]:
    assert all(check.detail for check in checks)
    assert all(check.remedy for check in checks if check.passed is False)
    return [check.name for check in checks if check.passed is False]


def test_a_server_that_captures_rightly(tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    checks = examine(server, tiny_llama)
    assert failed(checks) == []
    assert [check.name for check in checks if check.passed is None] == ["tensor-parallel ranks agree"]
    by_name = {check.name: check for check in checks}
    assert "lengths 1, 2, 127, 128, 129" in by_name
    assert "chunk boundaries 63, 64, 65, 128" in by_name
    assert "the longest, 299 tokens" in by_name
    assert "alone and among 64" in by_name
    assert server.plain > 0
    assert max(map(len, server.seen)) == 299
    assert max(map(max, server.seen)) < server.info.vocab_size - 15
    assert list(server.root.iterdir()) == []


def test_ranks_that_agree(tiny_llama: Path, tmp_path: Path) -> None:
    checks = examine(capturing.Capturing(tiny_llama, tmp_path, tp=2), tiny_llama)
    assert failed(checks) == []
    assert all(check.passed for check in checks)


def partial_sums(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    return (aux * 0.5 if server.rank == 1 else aux), last


def chunk_again(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    """The second chunk's first row comes out of the first chunk."""
    if server.chunk < len(aux) < 2 * server.chunk + 5:
        aux[server.chunk] = aux[0]
    return aux, last


def neighbours(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    """Rows shift where other requests are under way."""
    return (aux.roll(1, 0), last) if server.under_way > 2 else (aux, last)


def cached(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    """Rows of a prefix that was seen before are those of something else."""
    if len(aux) == 8 and server.seen and any(len(ids) == 8 for ids in server.seen):
        aux[:5] = aux[5]
    return aux, last


def not_a_number(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    aux[-1, 3] = torch.nan
    return aux, last


def same_rows(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    return aux[:1].expand_as(aux), last


def another_last(server: capturing.Capturing, wanted: Any, aux: torch.Tensor, last: torch.Tensor) -> Any:
    return aux, aux.chunk(3, -1)[0]


@pytest.mark.parametrize(
    ("spoil", "tp", "found"),
    [
        (partial_sums, 2, "tensor-parallel ranks agree"),
        (chunk_again, 1, "chunk boundaries 63, 64, 65, 128"),
        (neighbours, 1, "alone and among 64"),
        (cached, 1, "shared prefixes"),
        (not_a_number, 1, "states are finite"),
        (same_rows, 1, "states are not constant"),
        (another_last, 1, "head(last) is the server's token"),
    ],
)
def test_faults(spoil: Any, tp: int, found: str, tiny_llama: Path, tmp_path: Path) -> None:
    assert found in failed(examine(capturing.Capturing(tiny_llama, tmp_path, spoil, tp), tiny_llama))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"layers": [3, 5, 6]}, r"hidden_states \[3, 5, 6\], not \[2, 4, 5\]"),
        ({"problem": "speculation is on"}, "speculation is on"),
        ({"root": "/elsewhere"}, "writes to /elsewhere"),
    ],
)
def test_a_plugin_that_is_not_as_wanted(said: dict[str, Any], message: str, tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    server.say(0, **said)
    check, flags = examine(server, tiny_llama)
    assert flags.passed
    assert check.passed is False
    assert check.remedy
    assert re.search(message, check.detail)


def test_no_plugin(tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    (server.status / "rank0.json").unlink()
    check, flags = examine(server, tiny_llama)
    assert flags.passed
    assert (check.name, check.passed) == ("the plugin is loaded", False)


def test_flags_in_the_way(tiny_llama: Path, tmp_path: Path) -> None:
    checks = examine(capturing.Capturing(tiny_llama, tmp_path), tiny_llama, speculative="EAGLE3")
    assert failed(checks) == ["its flags allow capture"]
    assert len(checks) == 2


def test_what_there_is_no_time_for_is_not_passed(tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    with server as endpoint:
        checks = list(doctor.check([endpoint], server.info, target(tiny_llama), Capture(), Silent(), 0.5))
    assert failed(checks) == []
    assert {check.name for check in checks if check.passed is None} >= {"the longest, 299 tokens"}


def test_other_files_are_left_alone(tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    for name in ("ranks.safetensors", ".n1.partial", "n127.failed"):
        (server.root / name).write_bytes(b"another's")
    assert failed(examine(server, tiny_llama)) == []
    assert sorted(path.name for path in server.root.iterdir()) == [".n1.partial", "n127.failed", "ranks.safetensors"]


def test_files_of_other_layers_are_not_taken(tiny_llama: Path, tmp_path: Path) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    server.say(0, layers=[3, 5, 6])
    tally = Tally(server.info.vocab_size, None)
    with server as endpoint:
        assert not collect(endpoint, {"a": [1, 2]}, server.info, tally, concurrency=1, vocab_size=100)
    assert "captured were the hidden_states [2, 4, 5], not [3, 5, 6]" in next(tally.checks()).detail
    assert list(server.root.iterdir()) == []


def test_ids_of_a_smaller_count_are_the_beginning() -> None:
    assert random_ids(100, 50, 3)[:7] == random_ids(7, 50, 3)
    assert set(random_ids(500, 40, 1)) == set(range(1, 24))


def spec(endpoint: Any) -> StepSpec:
    ready = {"servers": [endpoint.to_json()]}
    return StepSpec("doctor", 0, {"capture": Capture().model_dump()}, {"target": Path()}, {"server": ready})


def test_the_step(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    monkeypatch.setattr("eyas.engines.target.read", lambda out: target(tiny_llama))
    monkeypatch.setattr("eyas.engines.sglang.info.read", lambda url: server.info)
    with server as endpoint:
        result = doctor.run(spec(endpoint), tmp_path, Silent())
        server.say(0, layers=[3, 5, 6])
        with pytest.raises(UserError, match=r"^eyas doctor: the plugin is loaded failed: .*\[3, 5, 6\].*anew"):
            doctor.run(spec(endpoint), tmp_path, Silent())
    assert result["seconds"] > 0
    assert {check["name"] for check in result["checks"]} >= {"the plugin is loaded", "shared prefixes"}
    assert json.loads(json.dumps(result)) == result


def test_a_server_that_dies_asks_for_a_restart(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = capturing.Capturing(tiny_llama, tmp_path)
    monkeypatch.setattr("eyas.engines.target.read", lambda out: target(tiny_llama))
    monkeypatch.setattr("eyas.engines.sglang.info.read", lambda url: server.info)
    with server as endpoint:
        pass
    with pytest.raises(SystemExit) as ended:
        doctor.run(spec(endpoint), tmp_path, Silent())
    assert ended.value.code == 75


def test_logs_are_kept_where_something_failed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = {"python": "/no/such/python"}
    config = parse({"name": "a", "target": {"model": str(tiny_llama)}, "server": server}, "run.yaml")
    found = doctor.examine(config, Silent())
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [
        ("twin: the twin is captured from", False)
    ]
    (kept,) = tmp_path.glob("eyas-doctor-*")
    assert not (kept / "twin" / "model").exists()
    with pytest.raises(UserError, match="/no/such/python"):
        doctor.examine(config, Silent(), prove=False)
