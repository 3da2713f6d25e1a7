"""The answers step against a server: ids end to end, resumed by prompt key, equal to the in-process answers."""

import json

import pytest
import torch

from eyas.config import parse
from eyas.corpus.keys import prompt_key
from eyas.engines import target
from eyas.engines.inprocess.generate import answer
from eyas.engines.sglang import answers, client
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.spec import StepSpec
from fakesglang import FakeServer

COUNTS = {"train": 14, "heldout": 4}


@pytest.fixture
def fake(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.01)
    torch.set_num_threads(1)
    server = FakeServer(tiny_llama, tmp_path)
    yield server
    server.close()


@pytest.fixture
def step(tmp_path, fake, tiny_llama):
    config = parse(
        {
            "name": "t",
            "target": {"model": str(tiny_llama)},
            "engine": {"kind": "sglang"},
            "server": {"concurrency": 4},
            "answers": {"max_new_tokens": 9, "heldout_max_new_tokens": 12},
        },
        "test",
    ).model_dump(mode="json")
    for name in ("target", "prompts", "answers"):
        (tmp_path / name).mkdir()
    inputs = {name: tmp_path / name for name in ("target", "prompts")}
    target.run(StepSpec("target", 0, config, {}), tmp_path / "target", Silent())
    generator = torch.Generator().manual_seed(0)
    for split, count in COUNTS.items():
        rows = [[1, *torch.randint(3, 250, (3 + i % 5,), generator=generator).tolist()] for i in range(count)]
        lines = [json.dumps({"key": prompt_key(ids), "ids": ids}) + "\n" for ids in rows]
        (tmp_path / "prompts" / f"{split}.jsonl").write_text("".join(lines))

    def run():
        spec = StepSpec("answers", 0, config, inputs, {"server": fake.ready})
        result = answers.run(spec, tmp_path / "answers", Silent())
        json.dumps(result, allow_nan=False)
        return result

    run.out, run.prompts = tmp_path / "answers", tmp_path / "prompts"
    return run


def test_answers_are_the_targets_own(step, fake):
    result = step()
    assert (result["rows"], result["heldout_rows"], result["too_long"]) == (14, 4, 0)
    for split, longest in (("train", 9), ("heldout", 12)):
        rows = answers.read(step.out, split)
        prompts = [json.loads(line) for line in (step.prompts / f"{split}.jsonl").read_text().splitlines()]
        assert [row.key for row in rows] == [prompt["key"] for prompt in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.ids == answer(fake.target, [prompt["ids"]], longest)[0].ids
            assert row.prompt == len(prompt["ids"])
            assert row.finish == ("stop" if row.ids[-1] == 2 else "length")
    tokens = sum(len(row.answer) for row in answers.read(step.out, "train"))
    assert result["tokens"] == tokens
    assert not (step.out / "answered.jsonl").exists()
    assert fake.seen[0]["sampling_params"]["stop_token_ids"] == [2]
    assert fake.most <= 4


def test_an_end_token_that_the_server_strips_is_put_back(fake):
    reply = {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}
    assert answers.answer_of("u", reply, [2], 259) == ([5, 6, 2], "stop")
    reply["output_ids"] = [5, 6, 2]
    assert answers.answer_of("u", reply, [2], 259) == ([5, 6, 2], "stop")
    with pytest.raises(UserError, match="replies lack output_ids"):
        answers.answer_of("u", {"text": "x", "meta_info": reply["meta_info"]}, [2], 259)
    reply["output_ids"] = [5, 700, 2]
    with pytest.raises(UserError, match="the id 700 at position 1"):
        answers.answer_of("u", reply, [2], 259)


def test_a_later_attempt_asks_only_for_what_is_missing(step, fake):
    fake.dies_after = 7
    with pytest.raises(SystemExit) as end:
        step()
    assert end.value.code == 75
    journal = step.out / "answered.jsonl"
    whole = journal.read_bytes()
    kept = whole.count(b"\n")
    assert 3 <= kept <= 7
    journal.write_bytes(whole + b'{"split": "train", "key": "cut sh')
    again = FakeServer(fake.model, step.out.parent / "again")
    fake.url = again.url
    assert step()["rows"] == 14
    assert len(again.seen) == sum(COUNTS.values()) - kept
    again.close()


def test_prompts_without_room_are_left_out_and_counted(step, fake):
    path = step.prompts / "train.jsonl"
    path.write_text(path.read_text() + json.dumps({"key": "long", "ids": [5] * 503}) + "\n")
    assert step()["too_long"] == 1
    (step.out / "answers" / "train.jsonl").unlink()
    fake.facts = {"context_length": 10}
    with pytest.raises(UserError, match=r"no train prompt leaves room"):
        step()


def test_a_prompt_of_another_vocabulary_is_refused_before_it_is_sent(step, fake):
    (step.prompts / "heldout.jsonl").write_text(json.dumps({"key": "k", "ids": [1, 300]}) + "\n")
    with pytest.raises(UserError, match="prompt k: the id 300 at position 1"):
        step()
    assert fake.seen == []
