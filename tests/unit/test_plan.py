"""The demo's graph and its digests."""

import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from eyas import config
from eyas.corpus import builtin
from eyas.errors import UserError
from eyas.files import write_json
from eyas.plan import code, digests, graph, loads
from eyas.plan.changes import why
from eyas.plan.graph import Step

ALL = (
    "target",
    "prompts",
    "answers",
    "capture",
    "vocabulary",
    "train",
    "export",
    "replay",
    "decode",
    "verdict",
    "card",
)


SERVED = (
    "target",
    "twin",
    "prompts",
    "doctor",
    "answers",
    "capture",
    "baseline",
    "vocabulary",
    "train",
    "export",
    "replay",
    "decode",
    "again",
    "verdict",
    "card",
)
SGLANG = {"engine": {"kind": "sglang"}, "pilot": {"samples": 0}}


def load(**sections: Any) -> config.RunConfig:
    return config.parse({"name": "demo", "target": {"model": "m"}, **sections}, "test")


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "digest", lambda entry: "code")


def plan(loaded: config.RunConfig) -> digests.Plan:
    services = graph.build_services(loaded)
    return digests.make(graph.build(loaded), loaded.model_dump(mode="json"), loaded.seed, services)


def changed(base: Any = MappingProxyType({}), **sections: Any) -> list[str]:
    """The steps whose digest differs from that of the plain run file."""
    before, after = (plan(loaded) for loaded in (load(**base), load(**{**base, **sections})))
    return [new.name for old, new in zip(before.steps, after.steps, strict=True) if old.digest != new.digest]


def test_the_graph_is_the_table_of_the_seams() -> None:
    text = (Path(__file__).parents[2] / "docs" / "seams.md").read_text()
    demo, _, served = text.partition("## The steps of an SGLang run")
    for part, loaded, names in ((demo, load(), ALL), (served, load(**SGLANG), SERVED)):
        rows = re.findall(r"^\| (\w+) \| `(eyas\.[\w.]+:\w+)` \| ?([\w, ]*?) ?\|", part, re.MULTILINE)
        table = [(name, entry, tuple(n for n in needs.replace(" ", "").split(",") if n)) for name, entry, needs in rows]
        services = [(step.name, step.entry, step.needs) for step in graph.build_services(loaded)]
        steps = {step.name: (step.name, step.entry, step.needs) for step in graph.build(loaded)}
        assert tuple(steps) == names
        told = [row[0] for row in table]
        assert table == [*services, *(steps[name] for name in names if name in told)]
        others = {step.name: (step.name, step.entry, step.needs) for step in graph.build(load())}
        assert all(others[name] == steps[name] for name in names if name not in told)


def test_a_served_run_loads_the_target_after_the_twin_and_leases_its_server() -> None:
    made = plan(load(**SGLANG))
    leases = {planned.name: planned.step.leases for planned in made.steps if planned.step.leases}
    assert leases == {
        "doctor": ("server",),
        "answers": ("server",),
        "capture": ("server",),
        "baseline": ("server",),
        "decode": ("drafted",),
        "again": ("plain",),
    }
    assert made.service("server").step.needs == ("target", "twin")
    assert "export" in made.service("drafted").step.needs
    existing = plan(load(engine={"kind": "sglang"}, server={"url": "http://h:1", "captures": "/c"}))
    assert "twin" not in [planned.name for planned in existing.steps]
    assert existing.service("server").step.needs == ("target",)
    assert [service.name for service in existing.services] == ["server"]
    names = [planned.name for planned in existing.steps]
    assert {"baseline", "decode"}.isdisjoint(names), "an existing server is not ours to start with a draft"
    assert existing.steps[-2].step.needs == ("replay", "train", "vocabulary", "capture", "target", "export")
    assert plan(load()).services == ()


def test_the_builtin_prompts_are_as_many_as_the_graph_thinks() -> None:
    assert len(builtin.load("train")) == graph.BUILTIN_PROMPTS


def test_a_pilot_comes_before_a_large_run() -> None:
    """Everything once on few prompts, with outputs of its own; the full run waits for the gate behind it."""
    large = load(engine={"kind": "sglang"}, prompts={"heldout_limit": 400})
    steps = {step.name: step for step in graph.build(large)}
    names = list(steps)
    assert names.index("pilot") < names.index("answers")
    assert "pilot" in steps["answers"].needs
    assert "pilot" in steps["verdict"].needs
    small, full = steps["pilot-capture"], steps["capture"]
    assert (small.entry, small.needs, small.leases) == (full.entry, ("target", "pilot-answers"), ("server",))
    assert small.role("pilot-answers") == "answers"
    assert steps["pilot-decode"].leases == ("pilot-drafted",)
    assert steps["pilot-decode"].role("pilot-drafted") == "drafted"
    made = {planned.name: planned for planned in plan(large).steps}
    prompts = made["pilot-prompts"].config["prompts"]
    assert (prompts["train_limit"], prompts["heldout_limit"]) == (300, 100)
    assert made["prompts"].config["prompts"]["train_limit"] is None
    assert made["pilot-train"].digest != made["train"].digest


def test_a_random_draft_is_served_before_any_training() -> None:
    """Where it is asked for; and asking measures nothing else again."""
    loaded = load(**SGLANG, bench={"break_even": True})
    steps = {step.name: step for step in graph.build(loaded)}
    services = {step.name: step for step in graph.build_services(loaded)}
    assert "break-even" in steps["train"].needs
    assert steps["break-even"].leases == ("random",)
    assert services["random"].role("random-draft") == "export"
    digest = {one.name: one.digest for one in plan(load(**SGLANG)).steps}
    assert {one.name: one.digest for one in plan(loaded).steps}["baseline"] == digest["baseline"]


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"kind": "sglang"}, "prompts": {"train_limit": 1199}},
        {"engine": {"kind": "sglang"}, "pilot": {"samples": 0}},
        {"engine": {"kind": "sglang"}, "server": {"url": "http://h:1", "captures": "/c"}},
        {},
    ],
)
def test_a_small_run_needs_no_pilot(sections: dict[str, Any]) -> None:
    assert not [step.name for step in graph.build(load(**sections)) if step.name.startswith("pilot")]


def test_what_is_asked_for_becomes_a_step(tmp_path: Path) -> None:
    asked = load(**SGLANG, bench={"sweep": [5], "again": False}, drafts=[str(tmp_path)])
    steps = {step.name: step for step in graph.build(asked)}
    assert {"sweep", "candidates"} < set(steps["verdict"].needs)
    assert "again" not in steps
    assert [service.name for service in graph.build_services(asked)] == ["server", "drafted"]
    with pytest.raises(UserError, match=r"drafts: .*/gone is no folder"):
        graph.build(load(drafts=[str(tmp_path / "gone")]))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"server": {"port": 31000, "patience": 60.0, "concurrency": 8}}, []),
        ({"server": {"tp": 2}}, [name for name in SERVED if name not in ("target", "prompts")]),
        ({"decode": {"timing_prompts": 2}}, ["baseline", "replay", "decode", "again", "verdict", "card"]),
        ({"train": {"epochs": 1.0}}, ["train", "export", "replay", "decode", "again", "verdict", "card"]),
        ({"bench": {"sweep": [], "max_loads": 1}}, []),
        ({"bench": {"rounds": 5}}, ["baseline", "decode", "again", "verdict", "card"]),
    ],
)
def test_an_edit_of_a_served_run_changes_only_what_follows(sections: dict[str, Any], expected: list[str]) -> None:
    assert changed(SGLANG, **sections) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"decode": {"timing_prompts": 2}}, ["replay", "decode", "verdict", "card"]),
        ({"train": {"epochs": 1.0}}, ["train", "export", "replay", "decode", "verdict", "card"]),
        ({"draft": {"vocab_size": 9}}, ["vocabulary", "train", "export", "replay", "decode", "verdict", "card"]),
        ({"answers": {"batch": 2}}, list(ALL[2:])),
        ({"prompts": {"train_limit": 2}}, list(ALL[1:])),
        ({"seed": 1}, list(ALL)),
        ({"name": "other"}, []),
    ],
)
def test_an_edit_changes_only_what_follows(sections: dict[str, Any], expected: list[str]) -> None:
    assert changed(**sections) == expected


def test_heavy_steps_take_the_cpu() -> None:
    heavy = [step.name for step in graph.build(load()) if step.resources == ("cpu",)]
    assert heavy == ["answers", "capture", "train", "replay", "decode"]


def test_prompt_files_count_by_content(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n")
    sections = {"prompts": {"train": str(path)}}
    before = graph.build(load(**sections))[1].outside
    path.write_text("two\n")
    assert graph.build(load(**sections))[1].outside != before
    path.unlink()
    with pytest.raises(UserError, match=rf"prompts\.train: cannot read {path} \(No such file"):
        graph.build(load(**sections))


def test_a_target_folder_counts_without_reading_weights(tmp_path: Path) -> None:
    header = b'{"__metadata__":{}}'
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header + b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("")

    def outside() -> dict[str, str]:
        return dict(graph.build(load(target={"model": str(tmp_path)}))[0].outside)

    before = outside()
    assert {Path(name).name for name in before} == {"config.json", "tokenizer.json", "model.safetensors"}
    os.utime(weights, ns=(1, 1))
    assert outside() == before
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert outside() != before
    weights.write_bytes(b"\xff" * 8)
    outside()


def test_a_target_at_home_counts_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert dict(graph.build(load(target={"model": "~/m"}))[0].outside).keys() == {str(tmp_path / "m" / "config.json")}


@pytest.mark.parametrize(
    ("sound", "runs"),
    [
        (ALL, []),
        ((), list(ALL)),
        ([name for name in ALL if name not in ("answers", "capture")], []),
        ([name for name in ALL if name != "export"], []),
        ([name for name in ALL if name != "card"], ["card"]),
        (["target", "prompts", "capture", "vocabulary", "replay", "export", "decode"], ["train", "verdict", "card"]),
        (["target", "capture", "export", "vocabulary"], ["train", "replay", "decode", "verdict", "card"]),
        (["verdict"], ["target", "prompts", "answers", "capture", "vocabulary", "train", "export", "card"]),
        (["card"], []),
    ],
)
def test_nothing_is_made_for_nobody(sound: list[str], runs: list[str]) -> None:
    loaded = load()
    plan = digests.make(graph.build(loaded), loaded.model_dump(mode="json"), loaded.seed)
    needed = plan.needed(set(sound))
    assert [name for name in ALL if name in needed and name not in sound] == runs


def test_a_graph_that_is_none_is_refused() -> None:
    a, b = Step("a", "x:y", needs=("b",)), Step("b", "x:y", needs=("a",))
    with pytest.raises(AssertionError, match="in a circle: a, b"):
        graph.in_order((a, b))
    with pytest.raises(AssertionError, match="a needs b, which is no step"):
        graph.in_order((a,))
    with pytest.raises(AssertionError, match="same name"):
        graph.in_order((replace(a, needs=()), replace(a, needs=())))
    with pytest.raises(AssertionError, match="leases web, which is no service"):
        graph.in_order((Step("a", "x:y", leases=("web",)),))
    assert [step.name for step in graph.in_order((a, replace(b, needs=())))] == ["b", "a"]


def test_why_a_step_runs_again(tmp_path: Path) -> None:
    step = Step("train", "x:y", needs=("capture",), sections=("train",), outside=(("p.txt", "1"),))
    now = digests.Planned(step, "new", "code", {"train": {"epochs": 2, "clip": 1}}, {"capture": "c1"})
    assert why(now, tmp_path) == "first time"

    def old(**other: Any) -> str:
        spec = {
            "code": "code",
            "config": {"train": {"epochs": 2, "clip": 1}},
            "outside": {"p.txt": "1"},
            "inputs": {"capture": "/r/steps/capture/c1/out"},
        }
        (tmp_path / "old").mkdir(exist_ok=True)
        write_json(tmp_path / "old" / "spec.json", spec | other)
        return why(now, tmp_path)

    assert old(config={"train": {"epochs": 1, "clip": 1}}) == "changed: train.epochs"
    assert old(code="other", outside={}) == "changed: code, outside files"
    assert old(inputs={"capture": "/r/steps/capture/c0/out"}) == "changed: input capture"
    assert old() == "changed: seed, entry or services"
    for damaged in ("{", "[1]", "null"):
        (tmp_path / "old" / "spec.json").write_text(damaged)
        assert why(now, tmp_path) == "first time"


def test_every_load_of_a_server_has_its_reason() -> None:
    made = plan(load(engine={"kind": "sglang"}, bench={"sweep": [2]}))
    everything = {planned.name for planned in made.steps}
    assert [(one.service, one.steps) for one in loads.loads(made, everything)] == [
        ("server", ["doctor", "pilot-answers", "pilot-capture", "pilot-baseline"]),
        ("pilot-drafted", ["pilot-decode"]),
        ("server", ["answers", "capture", "baseline"]),
        ("drafted", ["decode"]),
        ("plain", ["again"]),
    ]
    assert loads.of_their_own(made, everything) == (["sweep"], 10)
    assert [one.steps for one in loads.loads(made, {"decode", "again"})] == [["decode"], ["again"]]
    assert loads.loads(plan(load()), everything) == []


def test_a_run_with_a_goal_tunes_before_it_serves() -> None:
    asked = load(**SGLANG, tune={"goal": "latency"}, bench={"sweep": [2]})
    steps = {step.name: step for step in graph.in_order(graph.build(asked), graph.build_services(asked))}
    names = list(steps)
    assert names.index("twin") < names.index("tune") < names.index("doctor")
    assert all("tune" in service.needs for service in graph.build_services(asked))
    assert "tune" in steps["decode"].needs
    assert "tune" in steps["sweep"].needs
    made = plan(asked)
    assert loads.of_their_own(made, set(names)) == (["tune", "sweep"], 10)
    assert "tune" not in {step.name for step in graph.build(load(**SGLANG))}
    # Its goal says what is measured, whatever else the run measures.
    goal = {**SGLANG, "tune": {"goal": "latency"}}
    assert "tune" not in changed(goal, bench={"concurrencies": [1, 8], "temperatures": [0.6]})
    assert changed(goal, tune={"goal": "throughput@8"})[0] == "tune"


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"engine": {"kind": "transformers"}}, "engine.kind is transformers; tuning is for SGLang"),
        ({"server": {"url": "http://127.0.0.1:1"}}, "server.url: a server that runs already cannot be tuned"),
        ({"bench": {"max_loads": 3}}, "bench.max_loads is 3: tuning takes at least 4"),
    ],
)
def test_a_run_that_cannot_tune_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        graph.build(load(**{**SGLANG, "tune": {"goal": "latency"}, **sections}))
    assert str(error.value).startswith(line)
