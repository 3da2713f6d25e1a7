"""The steps from answers to decode, called as the runner calls them: pieces are kept, faults found, figures agree."""

import dataclasses
import json
import shutil

import pytest
import torch

from eyas.bench import candidates
from eyas.capture import step as capture
from eyas.config import parse
from eyas.decode import replay
from eyas.decode import step as decode
from eyas.draft import export, vocabulary
from eyas.engines import answers, target
from eyas.engines.inprocess.generate import answer
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Silent
from eyas.spec import StepSpec
from eyas.store.shard import Shard
from eyas.store.store import FeatureStore
from eyas.store.writer import write
from eyas.train import step as train

OTHER_LAYERS = "eagle_aux_hidden_state_layer_ids"
PROMPTS = {"train": 20, "heldout": 6}


def config(folder):
    return parse(
        {
            "name": "t",
            "target": {"model": str(folder)},
            "answers": {"max_new_tokens": 12, "batch": 8},
            "draft": {"vocab_size": 90},
            "train": {"ttt_steps": 2, "epochs": 2.0, "batch_tokens": 60, "learning_rate": 1e-3},
            "decode": {"timing_prompts": 3, "batch": 4},
            "bench": {"temperatures": [0, 0.6, 1.0]},
        },
        "test",
    ).model_dump(mode="json")


class Graph:
    """Runs entries in their order, each into a folder of its own."""

    def __init__(self, root, model):
        self.root, self.config, self.results = root, config(model), {}

    def spec(self, name, *needs):
        inputs = {need: self.root / need for need in needs}
        return StepSpec(name, 0, self.config, inputs)

    def run(self, name, entry, *needs):
        (self.root / name).mkdir(exist_ok=True)
        self.results[name] = entry(self.spec(name, *needs), self.root / name, Silent())
        json.dumps(self.results[name], allow_nan=False)
        return self.results[name]

    def prompts(self):
        (self.root / "prompts").mkdir()
        generator = torch.Generator().manual_seed(0)
        for split, count in PROMPTS.items():
            rows = [
                {"ids": [1, 7, 7, *torch.randint(3, 250, (3 + i % 5,), generator=generator).tolist()]}
                for i in range(count)
            ]
            (self.root / "prompts" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def graph(tmp_path, tiny_llama):
    made = Graph(tmp_path, tiny_llama)
    made.run("target", target.run)
    made.prompts()
    return made


@pytest.fixture(scope="module")
def once(tmp_path_factory, tiny_llama):
    """Target, prompts and their answers, made once; copy the folder before working in it."""
    made = Graph(tmp_path_factory.mktemp("answered"), tiny_llama)
    made.run("target", target.run)
    made.prompts()
    made.run("answers", answers.run, "target", "prompts")
    return made.root


@pytest.fixture
def answered(once, tmp_path, tiny_llama):
    return Graph(shutil.copytree(once, tmp_path / "graph"), tiny_llama)


def prove(graph):
    return graph.run("capture", capture.run, "target", "answers")


def rewrite(graph, change, split="train"):
    """Change every sample of the first shard of a split, as a faulty engine would have written it."""
    path = min((graph.root / "answers" / "batches").glob(f"{split}-*.safetensors"))
    part = Shard(path)
    samples = [part.sample(i) for i in range(len(part))]
    write(path, [change(i, sample, samples) for i, sample in enumerate(samples)])


def test_the_chain_of_steps(answered):
    proven = prove(answered)
    assert proven["samples"] + proven["quarantined"] <= sum(PROMPTS.values())
    assert all(count["failed"] == 0 for count in proven["proofs"].values())
    assert answered.run("vocabulary", vocabulary.run, "target", "capture")["size"] == 90
    trained = answered.run("train", train.run, "target", "capture", "vocabulary")
    assert trained["loss"] > 0
    answered.run("export", export.run, "target", "capture", "train")
    predicted = answered.run("replay", replay.run, "target", "capture", "export")
    existing, other = answered.root / "export", answered.root / "other"
    shutil.copytree(existing, other)
    write_json(other / "config.json", {**read_json(other / "config.json"), "eyas": {}, OTHER_LAYERS: [1, 2, 3]})
    answered.config["drafts"] = [str(existing), str(other), str(answered.root / "gone")]
    tried = answered.run("candidates", candidates.run, "target", "capture")
    assert (tried["best"], tried["candidates"][0]["accept_length"]) == (str(existing), predicted["accept_length"])
    assert "made for hidden states [1, 2, 3]" in tried["candidates"][1]["problem"]
    assert "no config.json" in tried["candidates"][2]["problem"]
    decoded = answered.run("decode", decode.run, "target", "capture", "export")
    assert decoded["lossless"] is True
    assert decoded["by_position"] == decoded["predicted"]["by_position"] == predicted["by_position"]
    assert [warm["temperature"] for warm in decoded["sampled"]] == [0.6, 1.0]
    assert all(warm["rounds"] + warm["looping"]["rounds"] > 0 for warm in decoded["sampled"])
    assert 0 < decoded["speedup"]["low"] <= decoded["speedup"]["ratio"] <= decoded["speedup"]["high"]


def test_finished_batches_are_not_answered_again(graph, monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(*args, **kwargs)

    monkeypatch.setattr(answers, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        graph.run("answers", answers.run, "target", "prompts")
    result = graph.run("answers", answers.run, "target", "prompts")
    assert len(calls) == 3 + 4 - 2  # four batches, of which two were finished
    assert result["rows"] == PROMPTS["train"]


def test_one_row_from_a_neighbour_is_quarantined_and_many_stop_the_run(answered):
    def swap(i, sample, samples):
        other = samples[1]
        rows = min(len(sample.ids), len(other.ids))
        last = sample.last.clone()
        last[:rows] = other.last[:rows]
        return dataclasses.replace(sample, last=last) if i == 0 else sample

    rewrite(answered, swap)
    with pytest.raises(UserError, match=r"1 of \d+ samples failed .*max_quarantined"):
        prove(answered)
    answered.config["capture"]["max_quarantined"] = 0.5
    result = prove(answered)
    assert result["quarantined"] == 1
    store = FeatureStore.open(answered.root / "capture" / "train")
    assert len(store) == PROMPTS["train"] - 1
    assert "greedy" in store.quarantined[0].reason or "follows" in store.quarantined[0].reason


@pytest.mark.parametrize(
    "change",
    [
        lambda s: dataclasses.replace(s, aux=s.aux * float("nan")),
        lambda s: dataclasses.replace(s, aux=torch.zeros_like(s.aux)),
        lambda s: dataclasses.replace(s, last=s.last.roll(1, 0)),
        lambda s: dataclasses.replace(s, aux=s.aux.roll(s.last.shape[1], 1)),
    ],
    ids=["nan", "zeros", "last state a row off", "layers in another order"],
)
def test_a_faulty_capture_stops_the_run(answered, change):
    answered.config["capture"]["proof_share"] = 1.0
    rewrite(answered, lambda i, sample, samples: change(sample))
    with pytest.raises(UserError, match="failed their proofs"):
        prove(answered)


def test_a_flipped_byte_is_found(answered):
    path = min((answered.root / "answers" / "batches").glob("train-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="its bytes are not those that were written"):
        prove(answered)


def test_training_resumes_from_its_state(answered, monkeypatch):
    prove(answered)
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    whole = answered.run("train", train.run, "target", "capture", "vocabulary")
    other = Graph(answered.root, answered.config["target"]["model"])
    steps = []
    step = train.Trainer.step

    def stop(self, *args, **named):
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return step(self, *args, **named)

    monkeypatch.setattr(train.Trainer, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        other.run("again", train.run, "target", "capture", "vocabulary")
    resumed = other.run("again", train.run, "target", "capture", "vocabulary")
    assert resumed["digest"] == whole["digest"]
    assert len(steps) < 6 + whole["steps"]


def test_training_goes_on_with_an_existing_draft(answered):
    """Its weights and its vocabulary, not the one that this data would give."""
    prove(answered)
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    before = answered.run("train", train.run, "target", "capture", "vocabulary")
    existing = answered.root / "train" / "draft"
    answered.config["draft"] |= {"start": str(existing), "vocab_size": 40}
    answered.config["train"] |= {"epochs": 0.5}
    answered.root = answered.root / "again"
    answered.root.mkdir()
    for name in ("target", "capture"):
        (answered.root / name).symlink_to(existing.parents[1] / name)
    assert answered.run("vocabulary", vocabulary.run, "target", "capture")["size"] == 90
    made = read_json(existing / "config.json")
    write_json(existing / "config.json", made | {"eyas": {"contract": {"layers": [0, 1, 3]}}})
    with pytest.raises(UserError, match=r"train/draft: made for hidden states \[0, 1, 3\]"):
        answered.run("train", train.run, "target", "capture", "vocabulary")
    write_json(existing / "config.json", made)
    after = answered.run("train", train.run, "target", "capture", "vocabulary")
    assert after["curve"][0]["accept_length"] == before["curve"][-1]["accept_length"]
    assert after["digest"] != before["digest"]


def test_one_seed_one_checkpoint(answered):
    prove(answered)
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    one = answered.run("train", train.run, "target", "capture", "vocabulary")
    other = answered.run("twice", train.run, "target", "capture", "vocabulary")
    assert one["digest"] == other["digest"]


def test_speedup_has_no_interval_below_three_prompts():
    one = decode.speedup([{"plain": 1.05, "draft": 1.0}])
    assert one == {"ratio": pytest.approx(1.05), "low": None, "high": None}
    many = decode.speedup([{"plain": 1.0 + i / 10, "draft": 1.0} for i in range(5)])
    assert many["low"] < many["ratio"] < many["high"]


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.303), (3, 3.182), (7, 2.365), (29, 2.045)])
def test_student(freedom, quantile):
    assert decode.student(freedom) == pytest.approx(quantile, rel=0.02)


def test_a_prompt_without_room_for_an_answer_is_left_out_and_counted(graph):
    path = graph.root / "prompts" / "train.jsonl"
    path.write_text(path.read_text() + json.dumps({"ids": [1] + [9] * 505}) + "\n")
    result = graph.run("answers", answers.run, "target", "prompts")
    assert (result["rows"], result["too_long"]) == (PROMPTS["train"], 1)
    path.write_text(json.dumps({"ids": [1] + [9] * 505}) + "\n")
    with pytest.raises(UserError, match=r"no train prompt leaves room for 12 new tokens .* context of 512"):
        graph.run("answers", answers.run, "target", "prompts")


def test_a_prompt_that_just_fits_is_decoded(graph):
    rows = [json.dumps({"ids": [1, 7, *[9 + i] * 498]}) for i in range(3)]
    (graph.root / "prompts" / "heldout.jsonl").write_text("\n".join(rows) + "\n")
    graph.run("answers", answers.run, "target", "prompts")
    prove(graph)
    graph.run("vocabulary", vocabulary.run, "target", "capture")
    graph.run("train", train.run, "target", "capture", "vocabulary")
    graph.run("export", export.run, "target", "capture", "train")
    assert graph.run("decode", decode.run, "target", "capture", "export")["lossless"] is True


def test_states_of_another_target_are_refused(answered, make_tiny):
    prove(answered)
    answered.config["target"]["model"] = str(make_tiny(seed=5))
    answered.run("target", target.run)
    with pytest.raises(UserError, match=r"captured with model_digest"):
        answered.run("vocabulary", vocabulary.run, "target", "capture")


def test_training_leaves_only_the_draft(answered):
    prove(answered)
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    first = answered.run("train", train.run, "target", "capture", "vocabulary")
    assert sorted(p.name for p in (answered.root / "train").iterdir()) == ["curve.json", "draft", "training.json"]
    assert answered.run("train", train.run, "target", "capture", "vocabulary") == first


def test_a_sample_damaged_after_the_proofs_is_not_trained_on(answered):
    prove(answered)
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    path = min((answered.root / "capture" / "train").glob("shard-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"sample \w+ is damaged"):
        answered.run("train", train.run, "target", "capture", "vocabulary")


def test_fp8_features_are_coded_after_they_are_proven(answered):
    answered.config["store"]["codec"] = "fp8"
    proven = prove(answered)
    assert proven["quarantined"] == 0
    store = FeatureStore.open(answered.root / "capture" / "train")
    assert store.contract.dtype == "float8_e4m3fn"
    assert store.verify() == []
    assert bool(store.sample(0).last[0].isnan().all())
    assert FeatureStore.open(answered.root / "capture" / "heldout").contract.dtype == "float32"
    assert {path.name for path in (answered.root / "capture").iterdir() if path.is_dir()} == {"train", "heldout"}
    answered.run("vocabulary", vocabulary.run, "target", "capture")
    assert answered.run("train", train.run, "target", "capture", "vocabulary")["loss"] > 0
