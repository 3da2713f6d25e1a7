"""`eyas prepare` on real files with a real tokenizer: counts, cache, interruption, and what stops it."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.cli import app
from eyas.corpus import prepare as prepare_module
from eyas.corpus.keys import sample_key
from eyas.corpus.prepare import prepare
from eyas.corpus.tokens import Sample
from eyas.corpus.work import Orders, orders, sample_line
from eyas.errors import UserError
from eyas.progress import Silent

Run = Callable[..., dict[str, Any]]
TAGGED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def talk(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def text_of(ids: list[int]) -> str:
    """With the tokenizer of tests/tiny.py, as far as its texts are ASCII."""
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = text_of.tokenizer  # type: ignore[attr-defined]
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Path:
    from tokenizers import Tokenizer

    text_of.tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))  # type: ignore[attr-defined]
    return tiny_llama


@pytest.fixture
def how(model: Path) -> Orders:
    return orders(str(model), Silent(), {}, None, None)


@pytest.fixture
def run(tmp_path: Path, how: Orders) -> Run:
    def run(*names: str, orders: Orders = how, **more: Any) -> dict[str, Any]:
        return prepare(names, orders, tmp_path / "out", Silent(), **more)

    return run


def test_samples(tmp_path: Path, run: Run) -> None:
    name = write(tmp_path / "a.jsonl", talk("Q", "A", "R", "B"), {"prompt": "P", "response": "C"})
    report = run(name)
    first, second = samples(tmp_path / "out")
    ids, spans = first["ids"], first["spans"]
    assert text_of(ids) == (
        "<|start|>user\nQ<|end|><|start|>assistant\nA<|end|><|start|>user\nR<|end|><|start|>assistant\nB<|end|>"
    )
    assert [text_of(ids[a:b]) for a, b in spans] == ["A<|end|>", "B<|end|>"]
    assert first["key"] == sample_key(ids, [any(a <= i < b for a, b in spans) for i in range(len(ids))])
    assert [first["source"], second["source"]] == [f"{name}:1", f"{name}:2"]
    assert (report["rows"], report["kept"], report["samples"], report["supervised"]) == (2, 2, 2, 6)
    assert report["forms"] == {"messages": 1, "pair": 1}
    assert report["lengths"] == {"<=32": 1, "<=64": 1}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_what_is_read_is_never_written_over(tmp_path: Path, run: Run) -> None:
    run(write(tmp_path / "a.jsonl", talk("Q", "A")))
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    for name in (tmp_path / "out" / "samples.jsonl", tmp_path):
        with pytest.raises(UserError, match="is read here"):
            run(str(name))
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before


def test_nothing_is_lost_silently(tmp_path: Path, run: Run) -> None:
    """Pitfalls 26 and 27: each row is a sample, a counted duplicate, or a line of rejected.jsonl."""
    rows = [talk("Q", "A"), "", talk("Q", "A"), "{oops", talk("only a question"), {"x": 1}, talk("a", "")]
    name = write(tmp_path / "a.jsonl", *rows)
    with Path(name).open("ab") as file:
        file.write(b'{"prompt": "caf\xe9", "response": "x"}\n{"prompt": "cut sho')
    report = run(name, max_rejected=0.9)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == [
        (4, "not valid JSON"),
        (5, "no answer in it"),
        (6, "no known form"),
        (7, "an empty assistant turn"),
        (8, "not UTF-8 text"),
        (9, "not valid JSON"),
    ]
    assert {row["file"] for row in rejected} == {name}
    assert (report["rows"], report["kept"], report["duplicates"]) == (8, 1, 1)
    assert sum(report["rejected"].values()) == 6


def test_the_same_id_twice_is_no_duplicate(tmp_path: Path, run: Run) -> None:
    """Pitfall 26: contents tell rows apart, not what somebody numbered them with."""
    rows = [{"id": "7", **talk("Q", "A")}, {"id": "7", **talk("R", "A")}, {"id": "8", **talk("Q", "A")}]
    report = run(write(tmp_path / "a.jsonl", *rows))
    assert (report["samples"], report["duplicates"]) == (2, 1)


def test_a_share_of_rejects_stops_it(tmp_path: Path, run: Run) -> None:
    name = write(tmp_path / "a.jsonl", *[talk(f"Q{i}", "A") for i in range(18)], "{", "{")
    assert run(name, max_rejected=0.1)["samples"] == 18
    with pytest.raises(UserError, match=r"2 of 20 rows cannot be used, more than 5\.0% \(not valid JSON 2\)"):
        run(name)
    assert not (tmp_path / "out" / "samples.jsonl").exists()
    assert (tmp_path / "out" / "rejected.jsonl").read_text().count("\n") == 2


def test_nothing_supervised_names_the_part_of_the_template(tmp_path: Path, run: Run, model: Path) -> None:
    """Pitfall 23."""
    name = write(tmp_path / "a.jsonl", talk("Q", "A"))
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
    empty = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    for template, message in [
        (bare, r"the prompt has '<\|start\|>', with the answer 'A'; the template's generation prompt"),
        (empty, "generation tags hold no text"),
    ]:
        path = tmp_path / "other.jinja"
        path.write_text(template)
        with pytest.raises(UserError, match=f"no token of any row is supervised: .*{message}"):
            run(name, orders=orders(str(model), Silent(), {}, path, None))
    with pytest.raises(UserError, match=r"no answer in it, 1 times.*let the target answer them \(eyas regenerate\)"):
        run(write(tmp_path / "b.jsonl", talk("Q")))
    with pytest.raises(UserError, match="the data hold no rows"):
        run(write(tmp_path / "c.jsonl"))


def test_generation_tags(tmp_path: Path, run: Run, model: Path) -> None:
    path = tmp_path / "tagged.jinja"
    path.write_text(TAGGED)
    run(
        write(tmp_path / "a.jsonl", talk("Q", "A", "R", "B", "left")),
        orders=orders(str(model), Silent(), {}, path, None),
    )
    (sample,) = samples(tmp_path / "out")
    assert [text_of(sample["ids"][a:b]) for a, b in sample["spans"]] == ["A<|end|>", "B<|end|>"]
    assert text_of(sample["ids"]).endswith("B<|end|>")


def test_truncation(tmp_path: Path, run: Run, model: Path) -> None:
    """Pitfall 28."""
    name = write(tmp_path / "a.jsonl", talk("Q", "ABCDEF"), talk("Q" * 50, "A"))
    report = run(name, orders=orders(str(model), Silent(), {}, None, 22), max_rejected=0.5)
    (sample,) = samples(tmp_path / "out")
    assert [text_of(sample["ids"][a:b]) for a, b in sample["spans"]] == ["ABC"]
    assert (len(sample["ids"]), report["notes"]) == (22, {"cut at max_length": 1})
    assert report["rejected"] == {"the answer lies beyond max_length": 1}
    with pytest.raises(UserError, match="allow more tokens with --max-length"):
        run(name, orders=orders(str(model), Silent(), {}, None, 10))


def test_ids_end_to_end(tmp_path: Path, run: Run) -> None:
    """Pitfall 29: ids that are given stay as they are, and what was written is read again."""
    odd = {"ids": [1, 120, 2, 70, 70, 2], "labels": [-100, -100, -100, 70, 70, 2]}
    run(write(tmp_path / "a.jsonl", odd, talk("Q", "A"), {"ids": [1, 999], "mask": [0, 1]}), max_rejected=0.5)
    made = samples(tmp_path / "out")
    assert (made[0]["ids"], made[0]["spans"]) == (odd["ids"], [[3, 6]])
    assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text())["reason"] == (
        "a token id outside the target's vocabulary"
    )
    again = tmp_path / "again.jsonl"
    shutil.copy(tmp_path / "out" / "samples.jsonl", again)
    run(str(again))
    assert [(row["key"], row["ids"]) for row in samples(tmp_path / "out")] == [(r["key"], r["ids"]) for r in made]


def test_only_what_changed_is_done_again(tmp_path: Path, run: Run, model: Path) -> None:
    first = write(tmp_path / "a.jsonl", *[talk(f"Q{i}", "A") for i in range(5)], "{")
    second = write(tmp_path / "b.jsonl", *[talk(f"R{i}", "A") for i in range(3)])
    more = {"max_rejected": 0.5}
    assert run(first, **more)["cached"] == 0
    made = samples(tmp_path / "out")
    assert run(first, second, **more)["cached"] == 6
    assert samples(tmp_path / "out")[:5] == made
    assert run(second, first, **more)["cached"] == 9
    for changed in (
        orders(str(model), Silent(), {"x": 1}, None, None),
        orders(str(model), Silent(), {}, None, 500),
        orders(str(model), Silent(), {}, Path(write(tmp_path / "t.jinja", TAGGED)), None),
    ):
        assert run(first, orders=changed, **more)["cached"] == 0


def test_order_of_files_does_not_change_keys(tmp_path: Path, run: Run) -> None:
    names = [write(tmp_path / f"{n}.jsonl", *[talk(f"{n}{i}", "A") for i in range(4)]) for n in "abc"]
    run(*names)
    keys = {row["key"] for row in samples(tmp_path / "out")}
    run(*reversed(names), cache=tmp_path / "other.sqlite3")
    assert {row["key"] for row in samples(tmp_path / "out")} == keys


def test_several_processes_give_the_same(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "a.jsonl.gz"
    rows = [json.dumps(talk(f"Q{i}", "A" * (i % 7 + 1))) for i in range(3000)]
    packed.write_bytes(gzip.compress("\n".join(rows).encode()))
    run(str(packed), jobs=1)
    alone = (tmp_path / "out" / "samples.jsonl").read_bytes()
    monkeypatch.setattr(prepare_module, "ALONE_BYTES", 0)
    report = run(str(packed), jobs=2, cache=tmp_path / "other.sqlite3")
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == alone
    assert (report["cached"], report["samples"]) == (0, 3000)


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path, run: Run) -> None:
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        run(write(tmp_path / "a.jsonl", talk("Q", "A")), orders=Orders(tmp_path, (2,), 300))


class Interrupted(Silent):
    """Is interrupted at the first sign of progress."""

    def advance(self, amount: float) -> None:
        raise KeyboardInterrupt


def test_stopped_and_continued(tmp_path: Path, how: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.corpus.files.BLOCK", 2000)
    name = write(tmp_path / "a.jsonl", *[talk(f"Q{i}", "A") for i in range(500)])
    with pytest.raises(KeyboardInterrupt):
        prepare([name], how, tmp_path / "out", Interrupted())
    assert not (tmp_path / "out" / "samples.jsonl").exists()
    report = prepare([name], how, tmp_path / "out", Silent())
    assert 0 < report["cached"] < 500
    assert report["samples"] == 500


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.data())
def test_keys_are_sample_keys(ids: list[int], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    from eyas.corpus.shapes import runs

    line = json.loads(sample_line(Sample(ids, runs(mask))) + "}")
    assert (line["key"], line["ids"]) == (sample_key(ids, mask), ids)


def test_command(tmp_path: Path, model: Path) -> None:
    name = write(tmp_path / "a.jsonl", talk("Q", "A"), {"prompt": "P", "response": "C"})
    call = CliRunner().invoke
    result = call(app, ["prepare", name, "--target", str(model), "--out", str(tmp_path / "out"), "--preview", "1"])
    assert result.exit_code == 0, result.output
    assert "⟦A⟧⟦<|end|>⟧" in result.output
    assert f"{name}:1: 21 tokens, supervised 2 (9.5%)" in result.output
    assert re.search(r"rows kept +2\n", result.output)
    assert len(samples(tmp_path / "out")) == 2
    for arguments, message in [
        (["prepare", name, "--target", str(model)], "nothing to do"),
        (["prepare", name, "--out", "x"], "give either --target MODEL or --run"),
        (["prepare", name, "--target", "x", "--out", "x", "--chat-template-kwargs", "["], "not valid JSON"),
        (["prepare", "builtin", "--target", str(model), "--out", str(tmp_path / "o")], "have no answers"),
    ]:
        failed = call(app, arguments)
        assert isinstance(failed.exception, UserError), failed.output
        assert message in str(failed.exception)


def test_settings_of_a_run_file(tmp_path: Path, model: Path) -> None:
    runfile = tmp_path / "run.yaml"
    runfile.write_text(
        f"name: x\ntarget: {{model: {model}, chat_template_kwargs: {{tokenize: true}}}}\ndata: {{max_rejected: 0.5}}\n"
    )
    from eyas.ui.data import settings

    assert settings(None, runfile, None) == (str(model), {"tokenize": True}, 0.5)
    assert settings(None, runfile, '{"a": 1}') == (str(model), {"a": 1}, 0.5)
