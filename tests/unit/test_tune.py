"""`eyas tune`, whole, against servers that it starts itself; how fast they are is made up by what their flags say."""

import dataclasses
import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from eyas.bench import measure
from eyas.bench.measure import Block, Load, Prompt, Request
from eyas.bench.tune import contest, machine, trial, tune
from eyas.config import RunConfig, parse
from eyas.engines import target as targets
from eyas.engines.sglang import command, info
from eyas.errors import UserError
from eyas.files import write_json
from eyas.progress import Progress, Silent
from eyas.report.tuned import write_plot
from eyas.spec import StepSpec
from eyas.ui import tuned

TESTS = Path(__file__).parents[1]
RULES = {"disable-overlap-schedule": 0.5, "enable-mixed-chunk": "die", "num-continuous-decode-steps": "crash"}


def config(model: Path, rules: dict[str, Any], **changed: Any) -> dict[str, Any]:
    env = {"PYTHONPATH": str(TESTS / "tunedserver"), "TUNED": json.dumps(rules), "OMP_NUM_THREADS": "1"}
    said: dict[str, Any] = {
        "name": "t",
        "target": {"model": str(model), "dtype": "float32"},
        "engine": {"kind": "sglang"},
        "server": {"python": sys.executable, "args": {"device": "cpu"}, "env": env},
        "bench": {"prompts": 3, "max_new_tokens": 3, "rounds": 2},
        "tune": {"goal": "throughput@2"},
    }
    return {**said, **{name: {**said.get(name, {}), **section} for name, section in changed.items()}}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Blocks really ask the server, but last as long as its `token_seconds` says. Holds the URLs that were asked."""
    asked: list[str] = []
    real, noise = measure.block, random.Random(0)

    def block(server: measure.SGLang, prompts: Sequence[Prompt], load: Load, progress: Progress) -> Block:
        asked.append(server.url)
        answered = real(server, prompts, load, progress)
        seconds = info.ask(server.url, "/server_info")["token_seconds"] * noise.lognormvariate(0, 0.001)
        requests = [
            Request(one.key, one.ids, 3 * seconds, seconds, [seconds] * 2, None, True) for one in answered.requests
        ]
        return Block(3 * seconds * len(requests) / load.concurrency, load.concurrency, requests)

    monkeypatch.setattr(measure, "block", block)
    return asked


def run(said: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = tune.run(parse(said, "test"), folder, Silent())
    assert json.loads((folder / "tune.json").read_text()) == json.loads(json.dumps(found, allow_nan=False))
    return found


def test_the_fastest_wins_and_what_crashes_or_dies_is_a_row(
    tiny_llama: Path, tmp_path: Path, made_up: list[str]
) -> None:
    found = run(config(tiny_llama, RULES), tmp_path)
    rows = {row["name"]: row for row in found["trials"]}
    steps = "num-continuous-decode-steps"
    assert list(rows) == [f"{steps} 4", "disable-overlap-schedule", "enable-mixed-chunk", f"{steps} 8"]
    assert rows["num-continuous-decode-steps 4"]["why"] == "the server did not start: ValueError: no such kernel"
    assert "slower, or failed" in rows["num-continuous-decode-steps 8"]["why"]
    assert rows["enable-mixed-chunk"]["state"] == "failed"
    assert "the server ended while it was measured" in rows["enable-mixed-chunk"]["why"]
    assert "lost it" in rows["enable-mixed-chunk"]["why"]
    assert len(list(tmp_path.glob("trials/*.log.txt"))) == 2
    assert rows["disable-overlap-schedule"]["ratio"]["ratio"] == pytest.approx(2, rel=0.01)
    assert found["winner"]["flags"] == {"disable-overlap-schedule": True}
    assert found["default_kept"] is False
    assert found["confirmation"]["order"] == ["default", "disable-overlap-schedule", "default"]
    assert found["confirmation"]["ratio"]["low"] > 1.9
    assert found["loads"] == 1 + 3 + 3
    assert found["grid_loads"] == 3 * 2 * 2
    assert "--disable-overlap-schedule" in found["launch"]
    assert {one["name"]: one["why"] for one in found["left_out"]}["NCCL_*"].startswith("no GPU")

    console = Console(width=120, record=True, file=io.StringIO())
    tuned.show(found, console)
    text = console.export_text()
    assert "num-continuous-decode-steps 4" in text
    assert "failed: the server did not start" in text
    assert f"Launch     {found['launch']}\n" in text, "a command is never broken"
    at = text.index("Run file\n") + len("Run file\n")
    assert yaml.safe_load(text[at:]) == {"server": {"args": {"disable-overlap-schedule": True}}}
    assert write_plot(found, tmp_path / "tune.svg")
    assert "disable-overlap-schedule" in (tmp_path / "tune.svg").read_text()

    # Everything is finished: nothing is started or asked again.
    made_up.clear()
    assert run(config(tiny_llama, RULES), tmp_path) == found
    assert made_up == []


def test_an_interrupted_search_goes_on(
    tiny_llama: Path, tmp_path: Path, made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = config(tiny_llama, {"disable-overlap-schedule": 0.5}, tune={"options": ["disable-overlap-schedule"]})
    loaded = list[str]()
    start, write = trial.started, trial.write_json

    def counted(config: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append("winner" if config.args.get("disable-overlap-schedule") else "default")
        return start(config, *args, **kwargs)

    def killed(*args: Any) -> None:
        if len(loaded) == 3:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(trial, "started", counted)
    monkeypatch.setattr(trial, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        run(said, tmp_path)
    assert loaded == ["default", "winner", "default"]
    monkeypatch.setattr(trial, "write_json", write)
    found = run(said, tmp_path)
    assert found["default_kept"] is False
    # The first period of the confirmation was finished; the second was not.
    assert loaded[3:] == ["default", "winner"]
    assert found["loads"] == 4


def test_a_trial_that_hangs_is_ended_at_its_deadline(tiny_llama: Path, tmp_path: Path, made_up: list[str]) -> None:
    rules = {"disable-overlap-schedule": "hang", "enable-mixed-chunk": "stall"}
    options = {"options": list(rules), "deadline": 4}
    said = config(tiny_llama, rules, tune=options)
    found = run(said, tmp_path)
    assert [row["why"] for row in found["trials"]] == [
        "hung: no end within 4 s (tune.deadline), while the server started",
        "hung: no end within 4 s (tune.deadline), while it was measured",
    ]
    assert found["why"] == "no setting is measurably faster than the default"
    assert found["confirmation"] is None
    made_up.clear()
    # A shorter deadline would not help, a longer one might: only then are these made again.
    assert run({**said, "tune": {**said["tune"], "deadline": 3}}, tmp_path)["trials"] == found["trials"]
    assert made_up == []


def test_a_trial_from_its_file_is_not_taken_for_the_server_that_is_up(
    tiny_llama: Path, tmp_path: Path, made_up: list[str]
) -> None:
    """The loser's file is lost, so that its server is up when the winner, whose file is there, is to be confirmed."""
    rules = {"disable-overlap-schedule": 1.0, "enable-mixed-chunk": 0.5}
    said = config(tiny_llama, rules, tune={"options": list(rules)})
    assert run(said, tmp_path)["winner"]["name"] == "enable-mixed-chunk"
    for path in (tmp_path / "trials").glob("*.json"):
        record = json.loads(path.read_text())
        if record["part"] != "search" or record["setting"]["name"] == "disable-overlap-schedule":
            path.unlink()
    again = run(said, tmp_path)["confirmation"]
    assert again["order"] == ["enable-mixed-chunk", "default", "enable-mixed-chunk"]
    assert again["ratio"]["ratio"] == pytest.approx(2, rel=0.01)


def test_where_the_default_does_not_serve_there_is_one_line_and_a_new_try(
    tiny_llama: Path, tmp_path: Path, made_up: list[str]
) -> None:
    broken = config(tiny_llama, {"device": "crash"}, tune={"options": ["disable-overlap-schedule"]})
    with pytest.raises(UserError, match="own configuration cannot be measured: the server did not start: ValueError"):
        run(broken, tmp_path)
    assert list((tmp_path / "trials").glob("*.json")) == []


def test_nothing_to_try_loads_nothing(tiny_llama: Path, tmp_path: Path, made_up: list[str]) -> None:
    found = run(config(tiny_llama, {}, tune={"options": ["OMP_NUM_THREADS"]}), tmp_path)
    assert (found["loads"], found["default_kept"], found["trials"]) == (0, True, [])
    assert found["why"] == "nothing that could be set matters here"
    assert not write_plot(found, tmp_path / "tune.svg")
    assert made_up == []


def test_nccl_settings_that_win_outside_are_tried_on_the_server(
    tiny_llama: Path, tmp_path: Path, made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs that are not there: what the machine is and how long an all-reduce takes are made up."""
    real = machine.read

    def two_gpus(config: Any, flags: Any) -> machine.Machine:
        found = real(config.model_copy(update={"args": {"device": "cpu"}}), flags)
        return dataclasses.replace(found, device="cuda", gpus=2, gpu="H200", capability=(9, 0), links="nvlink")

    noise = random.Random(0)

    def times(group: contest.Group, env: Mapping[str, str], repeats: int) -> list[list[float]]:
        assert (group.world, group.elements, group.dtype) == (2, (2 * hidden,), "float32")
        if env.get("NCCL_ALGO") == "Tree":
            raise UserError("hung: no end within 120 s")
        speed = 1.5 if env.get("NCCL_PROTO") == "LL" else 1.0
        return [[1e-5 / speed * noise.lognormvariate(0, 0.01) for _ in range(repeats)]]

    monkeypatch.setattr(tune.machine, "read", two_gpus)
    monkeypatch.setattr(contest.Group, "run", times)
    hidden = json.loads((tiny_llama / "config.json").read_text())["hidden_size"]
    for name in ("NCCL_PROTO", "NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    rules = {"NCCL_PROTO=LL": 0.5}
    said = config(tiny_llama, rules, tune={"options": ["disable-custom-all-reduce"]})
    said["server"] |= {"tp": 2, "args": {}}
    found = run(said, tmp_path)
    assert found["all_reduce"]["best"][0] == {"NCCL_PROTO": "LL"}
    assert found["winner"]["flags"] == {"disable-custom-all-reduce": True}
    assert found["winner"]["env"] == {"NCCL_PROTO": "LL"}
    assert " NCCL_PROTO=LL " in found["launch"]
    left = {one["name"]: one["why"] for one in found["left_out"]}
    assert "NVLink" in left["NCCL_P2P_DISABLE=1"]
    console = Console(width=120, record=True, file=io.StringIO())
    tuned.show(found, console)
    text = console.export_text()
    assert re.search(r"NCCL_ALGO=Tree +1 +hung: no end within 120 s", text)
    assert re.search(r"NCCL_PROTO=LL +3 +6\.\d +1\.[45]", text)
    assert "SGLang unknown, 2 x H200, linked by nvlink" in text


def test_as_a_step_it_gives_every_server_of_the_run_what_it_found(
    tiny_llama: Path, tmp_path: Path, made_up: list[str]
) -> None:
    rules = {"disable-overlap-schedule": 0.5}
    sections = parse(config(tiny_llama, rules, tune={"options": list(rules)}), "test").model_dump(mode="json")
    for name in ("target", "tune"):
        (tmp_path / name).mkdir()
    targets.run(StepSpec("target", 0, sections, {}), tmp_path / "target", Silent())
    inputs = {"target": tmp_path / "target"}
    found = tune.step(StepSpec("tune", 0, sections, inputs), tmp_path / "tune", Silent())
    write_json(tmp_path / "tune" / "result.json", found)  # as the runner does
    server = parse({"name": "t", "target": {"model": "m"}, "server": {"args": {"a": 1}, "env": {"B": "2"}}}, "t").server
    assert command.tuned(server, inputs) == server
    changed = command.tuned(server, {**inputs, "tune": tmp_path / "tune"})
    assert changed.args == {"a": 1, "disable-overlap-schedule": True}
    assert changed.env == {"B": "2"}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"engine": {"kind": "transformers"}}, "engine.kind is transformers; tuning is for SGLang"),
        ({"server": {"url": "http://127.0.0.1:1"}}, "server.url: a server that runs already cannot be tuned"),
        ({"bench": {"max_loads": 3}}, "bench.max_loads is 3: tuning takes at least 4"),
        ({"tune": {"options": ["nonsense"]}}, "tune.options: no option nonsense; there are"),
        ({"server": {"python": "/nowhere/python"}}, "server.python: /nowhere/python is not there"),
        ({"server": {"env": {}}}, "has no SGLang"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(changed: dict[str, Any], line: str, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        run(config(tiny_llama, {}, **changed), tmp_path)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("goal", ["fast", "throughput", "throughput@0", "latency+", "latency,throughput@4"])
def test_an_unknown_goal_is_one_line(goal: str, tiny_llama: Path) -> None:
    with pytest.raises(UserError, match=r"test: tune\.goal: unknown goal .*write latency, throughput@16, or both"):
        parse(config(tiny_llama, {}, tune={"goal": goal}), "test")


def test_goals(tiny_llama: Path) -> None:
    def of(goal: str) -> list[int]:
        found: RunConfig = parse(config(tiny_llama, {}, tune={"goal": goal}), "test")
        return found.tune.concurrencies

    assert of("latency") == [1]
    assert of("throughput@16 + latency") == [1, 16]


@pytest.mark.long
def test_the_command_survives_a_kill(tiny_llama: Path, tmp_path: Path) -> None:
    """Killed while a trial is measured: the same command ends the server that was left, and goes on."""
    said = config(tiny_llama, {"disable-overlap-schedule": 1.0}, tune={"options": ["disable-overlap-schedule"]})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    line = [sys.executable, "-m", "eyas", "tune", "run.yaml", "--json"]
    first = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trials = tmp_path / "runs" / "t" / "tune" / "trials"
    while not list(trials.glob("*.json")):
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    (kept,) = trials.glob("*.json")
    before = kept.read_bytes()
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert kept.read_bytes() == before
    assert "search: disable-overlap-schedule" in done.stderr
    assert "search: default" not in done.stderr
    assert found["trials"][0]["state"] == "measured"
    assert (tmp_path / "runs" / "t" / "tune" / "tune.svg").exists()
