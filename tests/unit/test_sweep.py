"""The sweep step against servers that it starts itself: a tiny model behind SGLang's flags and HTTP."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.bench import baseline, breakeven, measure, sweep
from eyas.bench.measure import Block, Request
from eyas.capture import step as capture
from eyas.config import parse
from eyas.decode.acceptance import Tally
from eyas.draft import checkpoint, export, placeholder, vocabulary
from eyas.engines import answers, target, weights
from eyas.errors import UserError
from eyas.files import write_json
from eyas.progress import Silent
from eyas.spec import StepSpec
from eyas.train import step as train

TESTS = Path(__file__).parents[1]


def blocks(draft_tokens: int | None, concurrency: int, round_seconds: float) -> list[Block]:
    """Two passes over three answers of nine tokens, `round_seconds` each; of the drafts none is accepted."""
    tally = Tally(draft_tokens, rows=1) if draft_tokens else None
    for _ in range(8 if tally else 0):
        tally.add_round(1, 0)
    request = Request("0", list(range(9)), 0.01 + 8 * round_seconds, 0.01, [round_seconds] * 8, tally, True)
    three = [dataclasses.replace(request, key=str(i), seconds=request.seconds * (1 + i / 50)) for i in range(3)]
    return [Block(3 * request.seconds / concurrency * (1 + i / 50), concurrency, three) for i in range(2)]


@pytest.fixture(scope="module")
def made(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Everything that the step needs, each in a folder; blocks of plain and drafted servers are made up."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("swept")
    path = os.pathsep.join(str(one) for one in (TESTS / "playedserver", TESTS, *filter(None, sys.path)))
    config = parse(
        {
            "name": "t",
            "target": {"model": str(tiny_llama), "dtype": "float32"},
            "server": {"python": sys.executable, "env": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            "answers": {"max_new_tokens": 9},
            "draft": {"vocab_size": 90},
            "train": {"ttt_steps": 2, "epochs": 1.0, "batch_tokens": 60, "learning_rate": 1e-3},
            "decode": {"draft_tokens": 3},
            "bench": {"concurrencies": [1, 2], "prompts": 3, "max_new_tokens": 6, "rounds": 2,
                      "temperatures": [0.0, 1.0], "sweep": [1, 2], "max_loads": 2},
        },
        "test",
    ).model_dump(mode="json")  # fmt: skip
    for name in ("prompts", "baseline", "decode"):
        (root / name).mkdir()
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("heldout", 4)):
        rows = [[1, 7, *torch.randint(3, 250, (3 + i,), generator=generator).tolist()] for i in range(count)]
        (root / "prompts" / f"{split}.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows))
    for name, entry, *needs in (
        ("target", target.run),
        ("answers", answers.run, "target", "prompts"),
        ("capture", capture.run, "target", "answers"),
        ("vocabulary", vocabulary.run, "target", "capture"),
        ("train", train.run, "target", "capture", "vocabulary"),
        ("export", export.run, "target", "capture", "train"),
    ):
        (root / name).mkdir()
        entry(StepSpec(name, 0, config, {need: root / need for need in needs}), root / name, Silent())
    for name, k, seconds in (("baseline", None, 0.01), ("decode", 3, 0.1)):
        for number, (concurrency, heat) in enumerate([(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)]):
            said = {"workload": "heldout", "concurrency": concurrency, "temperature": heat}
            prefix = baseline.DRAFTED if k else baseline.PLAIN
            path_of = root / name / f"{prefix}-{number:03}.json"
            write_json(path_of, {**said, "blocks": [one.to_json() for one in blocks(k, concurrency, seconds)]})
    return root, config


def run(made: tuple[Path, dict[str, Any]], out: Path, **bench: Any) -> dict[str, Any]:
    root, config = made
    out.mkdir(exist_ok=True)
    changed = {**config, "bench": {**config["bench"], **bench}}
    server = bench.pop("server", None)
    if server:
        changed = {**config, "server": {**config["server"], **server}}
    inputs = {name: root / name for name in ("target", "capture", "export", "baseline", "decode")}
    result = sweep.run(StepSpec("sweep", 0, changed, inputs), out, Silent())
    json.dumps(result, allow_nan=False)
    return result


def test_each_length_is_measured_once_and_an_interrupted_sweep_goes_on(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = list[int]()
    start, take = sweep.started, baseline.take

    def counted(*args: Any, **kwargs: Any) -> Any:
        starts.append(kwargs["draft"].tokens)
        return start(*args, **kwargs)

    def interrupted(*args: Any) -> Any:
        found = take(*args)
        if len(starts) == 2:
            raise KeyboardInterrupt
        return found

    # Which length is next depends on measured times (see test_cost.py); here both are to be measured.
    monkeypatch.setattr(sweep, "_next", lambda left, *_: left[0] if left else None)
    monkeypatch.setattr(sweep, "started", counted)
    monkeypatch.setattr(baseline, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "out")
    monkeypatch.setattr(baseline, "take", take)
    found = run(made, tmp_path / "out")
    assert sorted(starts) == [1, 2], "what an earlier attempt measured takes no load"
    assert found["loads"] == 2
    assert [(one["concurrency"], one["draft_tokens"]) for one in found["rows"]] == [
        (c, k) for c in (1, 2) for k in (1, 2, 3)
    ]
    assert all(one["measured"]["ratio"] > 0 and one["reason"] is None for one in found["rows"])
    assert {one["predicted"]["basis"] for one in found["rows"]} == {"fitted"}
    for k in (1, 2):
        there = baseline.read_blocks(tmp_path / "out" / f"tokens{k}", baseline.DRAFTED)
        assert set(there) == {("heldout", 1, 0.0), ("heldout", 2, 0.0)}, "other temperatures are the decode step's"
        assert measure.acceptance(there["heldout", 1, 0.0], k)["draft_tokens"] == k
    for best in found["best"]:
        here = [one["measured"]["ratio"] for one in found["rows"] if one["concurrency"] == best["concurrency"]]
        assert best["speedup"] == max(here)


def test_a_server_that_does_not_start_is_a_row_and_not_tried_again(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"env": {"PYTHONPATH": str(TESTS / "fakeserver"), "FAKE": "out of memory"}}
    found = run(made, tmp_path / "out", server=server)
    reasons = {one["draft_tokens"]: one["reason"] for one in found["rows"]}
    assert reasons[3] is None
    assert "did not start" in reasons[1]
    assert "memory" in reasons[2]
    assert found["loads"] == 2
    assert [one["draft_tokens"] for one in found["best"]] == [3, 3]
    monkeypatch.setattr(sweep, "started", lambda *args, **kwargs: pytest.fail("started again"))
    assert run(made, tmp_path / "out", server=server) == found


def test_a_server_that_ends_while_it_is_measured_is_a_row(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = baseline.take

    def ended(url: str, *args: Any) -> Any:
        monkeypatch.setattr(baseline, "take", take)
        return take("http://127.0.0.1:9", *args)  # nothing listens there

    monkeypatch.setattr(baseline, "take", ended)
    found = run(made, tmp_path / "out", sweep=[1], max_loads=1)
    (row, _) = (one for one in found["rows"] if one["draft_tokens"] == 1)
    assert row["measured"] is None
    assert "the server ended while it was measured" in row["reason"]


def test_without_loads_the_prediction_alone_is_told(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    found = run(made, tmp_path / "out", max_loads=0)
    assert found["loads"] == 0
    assert {one["reason"] for one in found["rows"] if one["draft_tokens"] != 3} == {"bench.max_loads was spent before"}
    assert found["crossover"] is None


def test_a_random_draft_tells_what_any_draft_must_reach(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 0.1 s beside a token of 0.01 s asks for ten tokens a step, of which three drafts give four at most."""
    root, config = made
    (tmp_path / "random").mkdir()
    inputs = {name: root / name for name in ("target", "capture", "baseline")}
    placeholder.run(StepSpec("random-draft", 0, config, inputs), tmp_path / "random", Silent())
    embedding = torch.nn.Embedding.from_pretrained(weights.embedding(tiny_llama).float())
    assert checkpoint.load(tmp_path / "random", embedding).config.draft_vocab_size == 90

    def costly(*_: Any, **__: Any) -> dict[baseline.Figure, list[Block]]:
        return {("heldout", n, 0.0): blocks(3, n, 0.1) for n in (1, 2)}

    monkeypatch.setattr(baseline, "take", costly)
    ready = {"servers": [{"url": "http://127.0.0.1:1", "root": None, "status": None}]}

    def asked(require: bool) -> dict[str, Any]:
        sections = {**config, "pilot": {**config["pilot"], "require": require}}
        return breakeven.run(StepSpec("break-even", 0, sections, inputs, {"drafted": ready}), tmp_path, Silent())

    assert [row["break_even"] for row in asked(False)["rows"]] == [pytest.approx(10.0, rel=0.01)] * 2
    with pytest.raises(UserError, match=r"would have to reach 9\.98 tokens a step, and 4 is all there is"):
        asked(True)
