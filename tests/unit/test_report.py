"""The report: a whole page from any run folder."""

import json
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.verdict import decide, undecided
from eyas.report import build
from eyas.report.data import curve, read

HOSTILE = """<script>alert("x")</script>'&amp; ünï \U0001f985 $\\frac{"""
VOID = {"meta", "link", "br", "hr", "img", "use", "path", "rect"}
START = 1_760_000_000.0


class Page(HTMLParser):
    """Checks that tags nest, and gathers what could reach outside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID - {"path", "rect", "use"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def acceptance(rounds: int, *accepted: int) -> dict[str, Any]:
    rows = [{"position": i + 1, "reached": n, "accepted": a}
            for i, (n, a) in enumerate(zip([rounds, *accepted], accepted, strict=False))]  # fmt: skip
    return {
        "accept_length": 1 + sum(accepted) / rounds,
        "rounds": rounds,
        "accepted": sum(accepted),
        "draft_tokens": len(accepted),
        "by_position": rows,
        "looping": {"rows": 4, "accept_length": 2.87},
    }


RESULTS: dict[str, dict[str, Any]] = {
    "target": {"folder": "/models/smollm2", "layers": 30},
    "prompts": {"train": 600, "heldout": 64, "rejected": 3},
    "answers": {"rows": 600, "tokens": 71_234},
    "capture": {
        "samples": 597, "tokens": 92_000, "supervised": 70_900, "quarantined": 3, "bytes": 310_000_000,
        "proofs": {"same again, alone": {"checked": 12, "failed": 0, "worst": 0.0},
                   "greedy token": {"checked": 70_900, "failed": 3, "worst": 0.0117}},
    },
    "vocabulary": {"size": 8192, "coverage": 0.9934},
    "train": {"steps": 400, "tokens": 567_000, "loss": 2.31},
    "export": {"digest": "e", "tensors": 14},
    "replay": acceptance(5200, 2300, 980, 410),
    "decode": {**acceptance(5100, 2250, 958, 399), "predicted": acceptance(5100, 2251, 958, 399), "lossless": True,
               "mismatches": 0, "prompts": 64, "speedup": {"ratio": 1.21, "low": 1.13, "high": 1.29}},
}  # fmt: skip
SECONDS = {"target": 4.2, "prompts": 0.8, "answers": 93.0, "capture": 61.0, "vocabulary": 0.5, "train": 212.0,
           "export": 1.1, "replay": 9.0, "decode": 48.0, "verdict": 0.1}  # fmt: skip
WORK = {"prompts": (664, "prompts"), "answers": (71_234, "tokens"), "capture": (92_000, "tokens"),
        "train": (400, "steps"), "replay": (5200, "slots"), "decode": (64, "prompts")}  # fmt: skip


def make_run(folder: Path) -> Path:
    """A finished run with realistic figures; target, prompts and answers reused."""
    results = {
        **RESULTS,
        "verdict": decide(**{k: RESULTS[k] for k in ("replay", "decode", "train", "vocabulary", "capture")}),
    }
    now, events, steps = 0.0, [], {}
    for number, (name, seconds) in enumerate(SECONDS.items()):
        reused, digest = number < 3, f"{number:02x}" * 16
        home = folder / "steps" / name / digest
        put(home / "out" / "result.json", results[name])
        put(home / "exit.json", {"code": 0, "error": None, "seconds": seconds})
        lines: list[dict[str, Any]] = [{"t": START + now, "milestone": "loading"}]
        if name in WORK:
            amount, unit = WORK[name]
            lines += [
                {"t": START + now, "total": amount, "unit": unit},
                {"t": START + now + seconds * 0.9, "done": amount},
            ]
        if name == "train":
            lines += training_lines()
        (home / "progress.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"t": 17600', "utf-8")
        took = 0.3 if reused else seconds
        events.append({"ph": "X", "name": name, "ts": now * 1e6, "dur": took * 1e6, "pid": 1, "tid": 1})
        steps[name] = {"digest": digest, "state": "finished", "reused": reused, "seconds": seconds, "error": None}
        now += took
    put(
        folder / "timeline.json",
        {"traceEvents": events, "otherData": {"run": "demo", "started": START, "steps": steps}},
    )
    put(folder / "verdict.json", {**results["verdict"], "seconds": SECONDS, "seed": 0})
    put(
        folder / "versions.json",
        {"eyas": "0.1.0", "python": "3.11.2", "steps": {"torch": "2.11.0", "transformers": "5.0.0"}},
    )
    (folder / "run.yaml").write_text(
        "name: demo\nseed: 0\ntarget:\n  model: smollm2-135m\ndraft:\n  vocab_size: 8192\n"
    )
    return folder


def training_lines() -> list[dict[str, Any]]:
    dice = random.Random(0)
    lines: list[dict[str, Any]] = []
    for step in range(0, 401, 4):
        loss = 2.2 + 4.5 * math.exp(-step / 70) + dice.gauss(0, 0.06)
        metric = {"step": step, "tokens": step * 1417, "loss": loss, "learning_rate": 1e-4}
        lines.append({"t": START, "metric": metric})
        if step % 80 == 0:
            rise = 1 - math.exp(-step / 110)
            rates = {f"accept_{k}": rate * rise for k, rate in enumerate((0.45, 0.2, 0.085), 1)}
            lines.append({"t": START, "metric": {"step": step, "accept_length": 1 + sum(rates.values()), **rates}})
    return [*lines, {"t": START, "metric": {"step": 402, "tokens": 569_634, "loss": math.nan}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "demo")


def page_of(folder: Path) -> tuple[str, Page]:
    path = build(folder)
    assert path == folder / "report.html"
    assert sorted(p.name for p in folder.glob("*.partial")) == []
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"https?://|//\w+\.\w|@import|url\((?!#)", text)
    page = Page(text)
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    return text, page


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    put(path, value)


def test_every_figure_is_on_the_page(folder: Path) -> None:
    text, page = page_of(folder)
    for part in (
        "Deploy this drafter: it pays, measured with one request at a time",
        "1.71", "1.21×", "interval 1.13 to 1.29", "Lossless yes",
        "Time to a verified drafter", "7 min 10 s", "1 min 38 s of it by 3 reused steps",
        "1 predicted 5,100 2,251 44.1 % 44.1 %", "2 decoded 2,250 958 42.6 % 18.8 %",
        "same again, alone 12 0 0", "greedy token 70,900 3 0.0117",
        "train finished 3 min 32 s 400 steps 2.1 steps/s 050505050505",
        "vocab_size: 8192", "steps.torch 2.11.0", "python 3.11.2", "99.34%", "2.87",
    ):  # fmt: skip
        assert part in page.text, part
    assert page.tags.count("svg") == 5
    assert "pattern" in page.tags  # the reused steps' hatching
    assert not re.search(r"#0[1-6]0[1-6]0[1-6]\b", text)
    order = [page.text.index(title) for title in (
        "Deploy this", "Accept length, decoded", "Acceptance by position", "Loss over training",
        "Held-out accept length over training", "Timeline", "Steps", "Proofs of the capture", "Configuration",
    )]  # fmt: skip
    assert order == sorted(order)


def test_same_folder_same_bytes(folder: Path) -> None:
    assert build(folder).read_bytes() == build(folder).read_bytes()


def test_ids_are_unique(folder: Path) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page_of(folder)[0])
    assert len(ids) == len(set(ids))


def test_hostile_strings_are_shown_not_obeyed(folder: Path) -> None:
    def timeline(value: dict[str, Any]) -> None:
        value["otherData"]["run"] = HOSTILE
        value["otherData"]["steps"]["train"] |= {"error": HOSTILE, "state": HOSTILE}
        value["otherData"]["steps"][HOSTILE.replace("/", "")] = {"digest": "..", "reused": True}

    edit(folder / "timeline.json", timeline)
    edit(folder / "verdict.json", lambda v: v["reasons"].extend([HOSTILE, HOSTILE]))
    edit(folder / "versions.json", lambda v: v.update({HOSTILE: HOSTILE}))
    (folder / "run.yaml").write_text(HOSTILE, encoding="utf-8")
    proofs = {HOSTILE: {"checked": HOSTILE, "failed": None, "worst": HOSTILE}}
    edit(folder / "steps/capture" / ("03" * 16) / "out/result.json", lambda v: v.update(proofs=proofs))
    text, page = page_of(folder)
    assert "<script" not in text
    assert page.text.count(HOSTILE) >= 9


def test_a_served_run_shows_checks_and_where_the_capture_spent_its_time(folder: Path) -> None:
    def served(value: dict[str, Any]) -> None:
        seconds = {"server": 50.0, "proofs": 80.0, "write": 20.0, "recapture": 5.0}
        value.update(seconds=seconds, tokens_per_second=1840.0)

    edit(folder / "steps/capture" / ("03" * 16) / "out/result.json", served)
    checks = [
        {"name": "shared prefixes", "passed": True, "detail": "3 compared"},
        {"name": "ranks agree", "passed": None, "detail": "there is one rank only"},
    ]
    put(folder / "steps/doctor/dd/out/result.json", {"checks": checks})
    edit(
        folder / "timeline.json", lambda v: v["otherData"]["steps"].update(doctor={"digest": "dd", "state": "finished"})
    )
    _, page = page_of(folder)
    assert "597 samples, 1,840 tokens/s from first request to last reply (50 s)" in page.text
    assert "shared prefixes passed 3 compared" in " ".join(page.text.split())
    assert "not tried" in page.text


LAUNCH = "python3 -m sglang.launch_server --model-path /models/m --speculative-algorithm EAGLE3"


def bench_row(concurrency: int, ratio: float, **changes: Any) -> dict[str, Any]:
    figure = {
        "tokens_per_second": 1234.4, "rounds": [1200.0, 1234.4], "tokens": 900, "requests": 16,
        "first_token": {"p50": 0.0123, "p99": 0.4}, "inter_token": {"p50": 0.00456, "p99": 1.5},
    }  # fmt: skip
    return {
        "workload": "heldout", "concurrency": concurrency, "temperature": 0.0, "draft_tokens": 3,
        "plain": figure, "draft": {**figure, "tokens_per_second": 1234.4 * ratio},
        "ratio": {"ratio": ratio, "low": ratio - 0.05, "high": ratio + 0.05},
        "acceptance": acceptance(5100, 2250, 958, 399), "round_seconds": 0.0131, "token_seconds": 0.01, **changes,
    }  # fmt: skip


def served(folder: Path, more: dict[str, Any]) -> None:
    """Let the run's verdict be one over these bench rows."""
    rows = [bench_row(1, 1.4), bench_row(8, 1.2), bench_row(32, 0.8), bench_row(1, 1.1, temperature=0.6)]
    parts = {name: RESULTS[name] for name in ("replay", "train", "vocabulary", "capture")}
    decoded = {**RESULTS["decode"], "bench": rows, "launch": LAUNCH}
    put(folder / "verdict.json", decide(**parts, decode=decoded, more=more))


def test_a_served_draft_is_shown_at_every_concurrency(folder: Path) -> None:
    ratio = {"ratio": 1.45, "low": 1.4, "high": 1.5}
    sweep = {
        "rows": [
            {"draft_tokens": 5, "concurrency": 1, "predicted": {"accept_length": 1.8, "speedup": 1.5},
             "measured": ratio, "reason": None},
            {"draft_tokens": 9, "concurrency": 1, "predicted": {"accept_length": 1.9, "speedup": 1.1},
             "measured": None, "reason": "out of memory"},
        ],
        "best": [{"concurrency": 1, "draft_tokens": 5, "speedup": 1.45}], "crossover": 8, "loads": 2,
    }  # fmt: skip
    served(folder, {"sweep": sweep})
    _, page = page_of(folder)
    for part in (
        "Deploy this drafter for up to 8 requests at a time, no more",
        f"Launch command {LAUNCH}",
        "It pays for up to 8 requests at a time; above that serve without the draft.",
        "Best number of draft tokens, by requests at a time: 5 at 1.",
        "heldout 8 1,234 1,481 1.20 1.15 to 1.25 1.71 1.31",
        "heldout, temperature 0.6 1 1,234",
        "heldout 1 plain 12.3 400 4.56 1,500",
        "1 5 1.80 1.50 1.45 1.40 to 1.50",
        "1 9 1.90 1.10 – – out of memory",
        "The sweep took 2 server loads. Above 8 requests at a time plain decoding wins.",
        "break-even",
    ):
        assert part in page.text, part
    assert page.tags.count("svg") == 7


def test_a_run_without_served_figures_has_no_sections_on_them(folder: Path) -> None:
    text = page_of(folder)[1].text
    for title in ("Launch command", "Speed-up by requests", "Latency", "Number of draft tokens"):
        assert title not in text


def test_a_draft_that_was_not_served_is_not_called_lossy(folder: Path) -> None:
    parts = {name: RESULTS[name] for name in ("replay", "train", "vocabulary", "capture")}
    put(folder / "verdict.json", undecided(**parts))
    text = page_of(folder)[1].text
    assert "Lossless – the draft was not served" in text
    assert "answers differ" not in text


def test_a_failed_run_says_so_on_top(folder: Path) -> None:
    def fail(value: dict[str, Any]) -> None:
        steps = value["otherData"]["steps"]
        steps["train"] |= {"state": "failed", "error": "disk full while writing state.pt (0 MiB free)"}
        for name in ("export", "replay", "decode", "verdict"):
            steps[name] = {"digest": "not yet", "state": "waiting", "reused": False, "seconds": None, "error": None}

    edit(folder / "timeline.json", fail)
    _, page = page_of(folder)
    assert page.text.index("The step train failed. disk full while writing") < page.text.index("No verdict yet")
    assert "1.21×" not in page.text, "the verdict of an earlier run is not this run's"
    assert "Loss over training" in page.text


@pytest.mark.parametrize(
    "gone", ["timeline.json", "progress.jsonl", "result.json", "verdict.json versions.json run.yaml"]
)
@pytest.mark.parametrize("how", ["missing", "damaged", "strange"])
def test_a_missing_piece_leaves_a_page(folder: Path, gone: str, how: str) -> None:
    for path in [path for name in gone.split() for path in folder.rglob(name)]:
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(b'{"a": \xff' if how == "damaged" else b'[1, null, {"metric": 3, "t": "x"}]')
    page_of(folder)


def test_an_empty_folder_gives_a_page(tmp_path: Path) -> None:
    _, page = page_of(tmp_path)
    for sentence in ("No verdict yet", "No loss was recorded", "No step has begun", "There is no run.yaml here"):
        assert sentence in page.text
    assert "svg" not in page.tags


def test_strange_verdicts_leave_a_page(folder: Path) -> None:
    for verdict in (
        {"deploy": "yes"},
        {"launch": 3, "bench": [1, {}, {"concurrency": 0, "ratio": {"ratio": 1}}, {"plain": [], "draft": None}]},
        {"bench": [{"concurrency": 4, "ratio": {"ratio": 1.1, "low": None}, "workload": HOSTILE}] * 9, "sweep": 1},
        {"sweep": {"rows": [{"concurrency": "x", "measured": 3}, {"concurrency": 2}], "best": {}, "crossover": "y"}},
        {"reasons": "none", "accept_length": [], "speedup": [1, {"ratio": "x"}, {"ratio": math.nan}]},
        {"accept_length": {"by_position": [{}, {"position": "1", "reached": 0, "accepted_served": math.inf}]}},
        {"accept_length": {"served": None}, "speedup": [{"concurrency": 1, "ratio": None, "low": None, "high": None}]},
    ):
        put(folder / "verdict.json", verdict)
        assert "Do not deploy this drafter" in page_of(folder)[1].text


def test_up_to_names_the_limit(folder: Path) -> None:
    edit(folder / "verdict.json", lambda v: v.update(deploy={"verdict": "up_to", "max_concurrency": 8}))
    assert "Deploy this drafter for up to 8 requests at a time, no more" in page_of(folder)[1].text


def test_without_matplotlib_a_sentence_stands_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import eyas.report

    monkeypatch.delitem(sys.modules, "eyas.report.plots", raising=False)
    monkeypatch.delattr(eyas.report, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, page = page_of(folder)
    assert "pip install 'eyas[report]'" in page.text
    assert "svg" not in page.tags


def test_without_a_timeline_the_newest_folder_counts(folder: Path) -> None:
    (folder / "timeline.json").unlink()
    newer = folder / "steps/train/newer"
    put(newer / "exit.json", {"code": 2, "error": "loss is not finite at step 12", "seconds": 8.0})
    run = read(folder)
    train = run.step("train")
    assert train is not None
    assert (train.digest, train.failed, train.error) == ("newer", True, "loss is not finite at step 12")
    assert "loss is not finite at step 12" in page_of(folder)[1].text


def test_work_and_rate_come_from_the_longest_stretch(folder: Path) -> None:
    lines = [
        {"t": 0, "total": 10, "unit": "files"}, {"t": 1, "done": 10},
        {"t": 1, "total": 100, "unit": "tokens", "done": 40}, {"t": 11, "done": 60}, {"t": 21, "done": 80},
    ]  # fmt: skip
    path = folder / "steps/replay" / ("07" * 16) / "progress.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    step = read(folder).step("replay")
    assert step is not None
    assert step.phase is not None
    assert (step.phase.unit, step.phase.done, step.phase.rate) == ("tokens", 80, 2.0)
    assert "80 of 100 tokens 2 tokens/s" in page_of(folder)[1].text


def test_after_a_resume_the_later_measurement_counts() -> None:
    metrics = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0},
        {"step": 3, "loss": math.nan},
        {"step": 2, "loss": 3.0},
    ]
    assert curve(metrics, "step", "loss") == ([1.0, 2.0], [5.0, 3.0])


def test_plots_take_extremes() -> None:
    plots = pytest.importorskip("eyas.report.plots")
    none = [None] * 16
    places = list(range(1, 17))
    for drawn in (
        plots.timeline([("a", 0.0, 0.0, True, False), ("b\n<&>" * 9, 0.0, 0.0, False, True)]),
        plots.timeline([("long", 0.0, 1e6, False, False)]),
        plots.acceptance(places, dict.fromkeys(("predicted", "decoded", "predicted joint", "decoded joint"), none)),
        plots.loss([5e9], [0.0]),
        plots.speedups({str(i): [(1, 0.5, None, 2.0), (1024, 3.0, 4.0, 2.0)] for i in range(9)}),
        plots.speedups({"b\n<&>" * 9: [(0.5, 0.0, None, None)]}),
        plots.length([0.0], [1.0]),
        plots.rates([([0.0], [0.0])] * 4),
    ):
        assert drawn.startswith("<svg")
        Page(drawn)


def test_what_overlap_saved(folder: Path) -> None:
    def overlap(value: dict[str, Any]) -> None:
        value["otherData"]["overlap"] = {"took": 600, "one_after_another": 900, "end": 610, "low": 500, "high": 700}

    edit(folder / "timeline.json", overlap)
    page = build(folder).read_text()
    assert "It took 10 min 00 s; one after another, the same would have taken 15 min 00 s." in page
    assert "Expected were 10 min 10 s (8 min 20 s to 11 min 40 s)." in page
