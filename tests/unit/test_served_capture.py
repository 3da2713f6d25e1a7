"""The capture step against a server: what is right becomes stores, each fault that servers are known for is caught."""

import dataclasses
import json
import re
import threading
import time
from collections import namedtuple

import pytest
import torch

from eyas import room
from eyas.bench import again, baseline
from eyas.bench import served as bench
from eyas.capture import flow, served
from eyas.capture.witness import Witness
from eyas.config import parse
from eyas.decode import replay
from eyas.draft import export, vocabulary
from eyas.engines import target
from eyas.engines.inprocess.generate import answer
from eyas.engines.inprocess.target import InProcessTarget
from eyas.engines.sglang import client
from eyas.engines.sglang.answers import Answered, to_line
from eyas.errors import UserError
from eyas.progress import Silent
from eyas.spec import StepSpec
from eyas.store.shard import Sample
from eyas.store.store import FeatureStore
from eyas.train import step as train
from fakesglang import LAYERS, FakeServer

COUNTS = {"train": 24, "heldout": 6}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(client, "HOOK_SECONDS", 0.2)
    monkeypatch.setattr("eyas.engines.sglang.http.LIVE_PAUSE", 0.01)
    monkeypatch.setattr(flow, "SHARD_SAMPLES", 5)
    monkeypatch.setattr(flow, "GROUP", 3)
    torch.set_num_threads(1)


@pytest.fixture
def fake(tmp_path, tiny_llama):
    server = FakeServer(tiny_llama, tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="module")
def rows(tiny_llama):
    """What the model answers, generated once; read-only."""
    made, generator = {}, torch.Generator().manual_seed(0)
    model = InProcessTarget(target.inspect(str(tiny_llama), Silent()), LAYERS, torch.float32, torch.device("cpu"))
    for split, count in COUNTS.items():
        prompts = [[1, *torch.randint(3, 250, (3 + i % 5,), generator=generator).tolist()] for i in range(count)]
        answered = [answer(model, [prompt], 12)[0] for prompt in prompts]
        made[split] = [Answered(split, str(i), a.ids, a.prompt, "length") for i, a in enumerate(answered)]
    return made


class Run:
    """The steps' folders, and answers as the answers step leaves them."""

    def __init__(self, root, fake, rows):
        self.root, self.fake = root, fake
        self.config = parse(
            {
                "name": "t",
                "target": {"model": str(fake.model), "dtype": "float32"},
                "engine": {"kind": "sglang"},
                "server": {"concurrency": 4},
                "answers": {"max_new_tokens": 12},
                "capture": {"layers": "default", "max_quarantined": 0.3},
                "draft": {"vocab_size": 90},
                "train": {"ttt_steps": 2, "epochs": 2.0, "batch_tokens": 60, "learning_rate": 1e-3},
                "decode": {"batch": 4},
                "bench": {"concurrencies": [1, 2], "prompts": 3, "max_new_tokens": 6, "rounds": 2},
            },
            "test",
        ).model_dump(mode="json")
        self.run("target", target.run)
        (root / "answers" / "answers").mkdir(parents=True)
        self.rows = {split: list(rows) for split, rows in rows.items()}
        for split in rows:
            self.write(split)

    def write(self, split):
        path = self.root / "answers" / "answers" / f"{split}.jsonl"
        path.write_text("".join(map(to_line, self.rows[split])))

    def run(self, name, entry, *needs, service="server"):
        (self.root / name).mkdir(exist_ok=True)
        inputs = {need: self.root / need for need in needs}
        spec = StepSpec(name, 0, self.config, inputs, {service: self.fake.ready})
        result = entry(spec, self.root / name, Silent())
        json.dumps(result, allow_nan=False)
        return result

    def capture(self):
        return self.run("capture", served.run, "target", "answers")

    def store(self, split="train"):
        return FeatureStore.open(self.root / "capture" / split)


@pytest.fixture
def steps(tmp_path, fake, rows):
    return Run(tmp_path, fake, rows)


def test_right_captures_become_stores(steps, fake):
    result = steps.capture()
    kept = sum(len(row.answer) > 1 for rows in steps.rows.values() for row in rows)
    assert result["samples"] == kept
    assert result["quarantined"] == 0
    assert all(count["failed"] == 0 for count in result["proofs"].values())
    assert result["proofs"]["greedy"]["checked"] == kept
    assert result["proofs"]["recaptured"]["checked"] == 1
    assert set(result["seconds"]) == {"server", "proofs", "write", "recapture"}
    store = steps.store("heldout")
    assert (store.contract.engine, store.contract.engine_version) == ("sglang", "0.5.fake")
    assert store.contract.layers == fake.layers
    assert store.verify() == []
    by_ids = {tuple(row.ids): row for row in steps.rows["heldout"]}
    for i in range(len(store)):
        sample = store.sample(i)
        row = by_ids[tuple(sample.ids.tolist())]
        right = fake.states(row.ids)
        torch.testing.assert_close(sample.aux, right["aux"])
        assert sample.answer.tolist() == [i >= row.prompt for i in range(len(row.ids))]
        assert sample.argmax[row.prompt - 1 : -1].tolist() == row.answer
        assert bool((sample.argmax[: row.prompt - 1] == -1).all())
        assert int(sample.argmax[-1]) == int(fake.target.greedy(right["last"][-1]))
    assert list(fake.root.iterdir()) == []
    left = sorted(p.name for p in (steps.root / "capture").iterdir())
    assert left == ["figures.json", "heldout", "train"]
    assert steps.capture() == result  # ended between the last act and the runner's


def test_training_states_may_be_halved(steps):
    steps.config["capture"]["dtype"] = "bfloat16"
    steps.config["capture"]["proof_share"] = 1.0
    assert steps.capture()["proofs"]["recaptured"]["checked"] > 20
    assert steps.store("train").contract.dtype == "bfloat16"
    assert steps.store("heldout").contract.dtype == "float32"


def test_the_chain_of_steps(steps, fake):
    steps.capture()
    plain = steps.run("baseline", baseline.run, "target", "capture")
    assert [(row["concurrency"], row["requests"]) for row in plain["figures"]] == [(1, 6), (2, 8)]
    steps.run("vocabulary", vocabulary.run, "target", "capture")
    steps.run("train", train.run, "target", "capture", "vocabulary")
    steps.run("export", export.run, "target", "capture", "train")
    steps.run("replay", replay.run, "target", "capture", "export")
    fake.draft_tokens = 3
    result = steps.run("decode", bench.run, "target", "capture", "export", "baseline", service="drafted")
    assert result["lossless"] is True
    assert result["inexact_rows"] == 0
    assert result["rounds"] > 0
    assert [row["position"] for row in result["by_position"]] == [1, 2, 3]
    assert result["speedup"]["ratio"] > 0
    assert result["engine"] == "SGLang 0.5.fake"
    assert [(row["concurrency"], row["draft_tokens"]) for row in result["bench"]] == [(1, 3), (2, 3)]
    assert "--speculative-num-draft-tokens 4" in result["launch"]
    fake.draft_tokens = 0
    both = steps.run("again", again.run, "target", "capture", "baseline", "decode", service="plain")
    assert [len(row["plain"]["rounds"]) for row in both["bench"]] == [4, 4]
    assert set(both["drift"]) == {"1", "2"}
    fake.draft_tokens = 2
    (steps.root / "decode" / bench.ROWS).unlink()
    fake.reply = lambda meta, body: meta.pop("spec_verify_ct", None)
    with pytest.raises(UserError, match="lack spec_verify_ct"):
        steps.run("decode", bench.run, "target", "capture", "export", "baseline", service="drafted")


def first(change, only=lambda wanted: "-sample-" in wanted.name):
    """A fault of the first capture alone (not of the comparison of ranks, nor of the second capture)."""
    hit = []

    def fault(wanted, tensors, server):
        if only(wanted) and (not hit or wanted.name == hit[0]):
            hit.append(wanted.name)
            return change(wanted, tensors, server)
        return tensors

    return fault


def row_short(wanted, tensors, server):
    return {name: tensor[:-1] for name, tensor in tensors.items()}


def neighbours_rows(wanted, tensors, server):
    other = server.states([9, *tensors["ids"].flip(0)[1:].tolist()])
    return {"ids": tensors["ids"], "aux": other["aux"], "last": other["last"]}


def nan(wanted, tensors, server):
    tensors["aux"][2, 5] = float("nan")
    return tensors


def zeros(wanted, tensors, server):
    tensors["last"][1] = 0
    return tensors


def wrong_layer(wanted, tensors, server):
    h = server.info.hidden_size
    tensors["aux"] = torch.cat([tensors["aux"][:, h : 2 * h], tensors["aux"][:, h:]], -1)
    return tensors


def before_the_norm(wanted, tensors, server):
    generator = torch.Generator().manual_seed(1)
    tensors["last"] = tensors["last"] * torch.randn(tensors["last"].shape[1], generator=generator).exp()
    return tensors


def other_ids(wanted, tensors, server):
    tensors["ids"] = tensors["ids"].roll(1)
    return tensors


def a_row_off(wanted, tensors, server):
    return {**tensors, "last": tensors["last"].roll(1, 0)}


def fails(wanted, tensors, server):
    return "nothing was written for 60 s: /dev/shm is full"


FAULTS = {
    "row short": (row_short, r"file: .* for a request of \d+ tokens"),
    "neighbour's rows": (neighbours_rows, "greedy: the head does not give the greedy choice"),
    "NaN": (nan, "finite: the first layer is not finite in 1 rows, the first at position 2"),
    "zeros": (zeros, "constant: the last state is zero in 1 rows"),
    "before the norm": (before_the_norm, "greedy: the head does not give the greedy choice"),
    "other ids": (other_ids, "ids: the forward pass saw other ids"),
    "a row off": (a_row_off, "greedy: the head does not give the greedy choice"),
    "full": (fails, "lost: nothing was written for 60 s: /dev/shm is full"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_quarantined_with_its_reason(steps, fake, name):
    change, reason = FAULTS[name]
    asked = []

    def again(wanted):  # a lost request is sent a second time under the same name
        asked.append(wanted.name)
        return "-sample-" in wanted.name

    fake.fault = first(change, again)
    result = steps.capture()
    assert result["quarantined"] == 1
    (one,) = [*steps.store("train").quarantined, *steps.store("heldout").quarantined]
    assert re.search(reason, one.reason), one.reason
    assert one.key not in [*steps.store("train").keys, *steps.store("heldout").keys]
    assert list(fake.root.iterdir()) == []


def test_a_truncated_file_is_quarantined(steps, fake):
    def cut(wanted, tensors, server):
        def later():
            path = wanted.file(server.root)
            while not path.exists():
                time.sleep(0.001)
            data = path.read_bytes()
            path.write_bytes(data[:-100])

        thread = threading.Thread(target=later)
        thread.start()
        server.cutting = thread
        return tensors

    fake.fault = first(cut)
    fake.reply = lambda meta, body: (
        getattr(fake, "cutting", threading.main_thread()).join() if hasattr(fake, "cutting") else None
    )
    result = steps.capture()
    assert result["quarantined"] == 1
    (one,) = [*steps.store("train").quarantined, *steps.store("heldout").quarantined]
    assert "cut short or damaged" in one.reason


def test_a_path_outside_the_root_is_neither_read_nor_deleted(steps, fake, tmp_path):
    (outside := tmp_path / "precious").write_text("x")

    def link(wanted, tensors, server):
        wanted.file(server.root).symlink_to(outside)

    fake.fault = first(link)
    result = steps.capture()
    assert result["quarantined"] == 1
    assert outside.read_text() == "x"


def test_a_wrong_layer_is_caught_by_the_second_capture(steps, fake):
    steps.config["capture"]["proof_share"] = 1.0
    fake.fault = lambda wanted, tensors, server: (
        wrong_layer(wanted, tensors, server) if "-sample-" in wanted.name else tensors
    )
    with pytest.raises(UserError, match="recaptured: the first layer differs by"):
        steps.capture()
    steps.config["capture"]["proof_share"] = 0.02  # one is enough
    with pytest.raises(UserError, match="1 of 1 samples failed their proofs"):
        steps.capture()


def test_ranks_that_differ_stop_the_run(steps, fake):
    fake.tp = 2
    fake.say()

    def partial_sums(wanted, tensors, server):
        if wanted.every_rank and server.rank == 1:
            tensors["aux"] *= 0.5
        return tensors

    fake.fault = partial_sums
    with pytest.raises(UserError, match="ranks 0 and 1 have other states of one request"):
        steps.capture()
    assert list(fake.root.iterdir()) == []
    fake.fault = lambda wanted, tensors, server: tensors
    assert steps.capture()["quarantined"] == 0


def test_a_missing_plugin_is_found_before_anything_is_sent(steps, fake):
    (fake.status / "rank0.json").unlink()
    with pytest.raises(UserError, match="the plugin is not loaded: rank 0 wrote no"):
        steps.capture()
    fake.say(problem="this SGLang has no init_spec_aux_hidden_state")
    with pytest.raises(UserError, match="the plugin cannot capture here, rank 0 says: this SGLang has no"):
        steps.capture()
    fake.say(layers=[3, 5, 7])
    with pytest.raises(UserError, match=r"has layers \[3, 5, 7\], the run file means \[2, 4, 5\]"):
        steps.capture()
    assert fake.seen == []
    fake.say()
    fake.fault = lambda wanted, tensors, server: None
    with pytest.raises(UserError, match="the first capture failed: the hook did not fire"):
        steps.capture()


def test_a_server_that_cannot_be_captured_from_is_refused(steps, fake):
    fake.facts = {"speculative_algorithm": "EAGLE3"}
    with pytest.raises(UserError, match="speculative"):
        steps.capture()


def test_too_little_room_is_found_before_the_run(steps, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("eyas.capture.preflight.shutil.disk_usage", lambda path: usage(0, 0, 1000))
    with pytest.raises(UserError, match=r"root: 1000 bytes are free, captures on their way need \d+\.\d KiB: free"):
        steps.capture()
    assert [room.size(n) for n in (1, 2048, 3 << 20, 5 << 29)] == ["1 bytes", "2.0 KiB", "3.0 MiB", "2.5 GiB"]


def test_room_is_wanted_only_for_what_is_left(steps, fake, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "eyas.capture.preflight.require_space", lambda roots, out, under_way, states, token: asked.append(states) or ""
    )
    fake.dies_after = 20
    with pytest.raises(SystemExit):
        steps.capture()
    steps.fake = again = FakeServer(fake.model, steps.root / "again")
    steps.capture()
    again.close()
    assert 0 < asked[1] < asked[0]


def test_little_room_slows_but_does_not_stop(steps, fake, monkeypatch):
    usage = namedtuple("usage", "total used free")
    token = 4 * fake.info.hidden_size * 4
    monkeypatch.setattr(client.shutil, "disk_usage", lambda path: usage(0, 0, 8 * 300 * token))
    monkeypatch.setattr("eyas.capture.preflight.require_space", lambda *args: None)
    most = []
    fake.fault = lambda wanted, tensors, server: (most.append(len(list(server.root.iterdir()))), tensors)[1]
    assert steps.capture()["quarantined"] == 0
    assert max(most) <= 300 // 8


def test_a_run_of_failures_stops_early_and_is_forgotten(steps, fake):
    steps.config["capture"]["max_quarantined"] = 0.01
    fake.fault = lambda wanted, tensors, server: nan(wanted, tensors, server) if "-sample-" in wanted.name else tensors
    with pytest.raises(UserError, match=r"1 of \d+ samples failed their proofs.*finite: the first layer"):
        steps.capture()
    assert len(fake.seen) < sum(COUNTS.values())
    fake.fault = lambda wanted, tensors, server: tensors
    result = steps.capture()
    assert result["quarantined"] == 0
    assert all(count["failed"] == 0 for count in result["proofs"].values())


def test_what_was_lost_is_asked_for_anew_by_a_later_attempt(steps, fake, monkeypatch):
    fake.fault = lambda wanted, tensors, server: (
        fails(wanted, tensors, server) if "-sample-" in wanted.name else tensors
    )
    with pytest.raises(UserError, match=r"samples failed their proofs.*lost: nothing was written for 60 s"):
        steps.capture()
    assert len([body for body in fake.seen if "-sample-" in body["rid"]]) > sum(COUNTS.values())  # each one twice
    assert not (steps.root / "capture" / flow.QUARANTINED).exists()
    fake.fault = lambda wanted, tensors, server: tensors
    assert steps.capture()["quarantined"] == 0


def test_a_file_that_is_gone_is_lost_and_not_wrong(steps, fake, monkeypatch):
    read, hit = flow.capturefile.read, []

    def gone(path, root):
        if "-sample-" in path.name and len(hit) < 3:
            hit.append(path)
            path.unlink()
        return read(path, root)

    monkeypatch.setattr(flow.capturefile, "read", gone)
    result = steps.capture()
    assert len(hit) == 3
    assert result["quarantined"] == 0
    assert result["samples"] == sum(len(row.answer) > 1 for rows in steps.rows.values() for row in rows)


def test_proofs_are_counted_with_each_shard(steps, fake, monkeypatch):
    counted = []

    def killed(path, value):
        if path.name == flow.COUNTS:
            counted.append((len(list(path.parent.glob("shards/*.safetensors"))), value["greedy"]["checked"]))
        write_json(path, value)

    write_json = flow.write_json
    monkeypatch.setattr(flow, "write_json", killed)
    steps.capture()
    assert len(counted) > 2
    assert counted[0][0] <= 2
    assert counted[0][1] > 0


def test_a_later_attempt_goes_on_by_key(steps, fake):
    fake.fault = first(nan)
    fake.dies_after = 20
    with pytest.raises(SystemExit) as end:
        steps.capture()
    assert end.value.code == 75
    kept = list((steps.root / "capture" / "shards").glob("*.safetensors"))
    assert kept
    data = kept[0].read_bytes()
    kept[0].write_bytes(data[:-9])  # the disk lost a piece: those samples are captured again
    again = FakeServer(fake.model, steps.root / "again")
    steps.fake = again
    (again.root / "stranger.safetensors").write_bytes(b"x")
    result = steps.capture()
    assert result["quarantined"] == 1  # not forgotten
    assert result["samples"] == sum(len(r.answer) > 1 for rows in steps.rows.values() for r in rows) - 1
    assert len([body for body in again.seen if "-sample-" in body["rid"]]) < result["samples"]
    assert [path.name for path in again.root.iterdir()] == ["stranger.safetensors"]
    again.close()


def test_what_was_answered_twice_or_too_long_is_left_out(steps, fake):
    steps.rows["train"] += [steps.rows["train"][0], steps.rows["heldout"][0]]
    steps.rows["train"].append(Answered("train", "long", [5] * 600, 4, "length"))
    steps.rows["train"].append(Answered("train", "empty", [5, 6, 2], 2, "stop"))
    steps.write("train")
    dropped = steps.capture()["dropped"]
    assert (dropped["duplicate"], dropped["too_long"]) == (2, 1)
    assert dropped["empty"] >= 1


def test_an_id_out_of_range_is_refused_before_anything_is_sent(steps, fake):
    steps.rows["train"][3] = dataclasses.replace(steps.rows["train"][3], ids=[1, 2, 259, 4])
    steps.write("train")
    with pytest.raises(UserError, match="answer 3: the id 259 at position 2"):
        steps.capture()
    assert fake.seen == []


def test_the_servers_own_log_probabilities_bear_witness(steps, fake):
    steps.config["capture"] |= {"witness": True, "proof_share": 0.2}
    result = steps.capture()
    assert result["proofs"]["witness"]["checked"] == 6
    assert result["proofs"]["witness"]["worst"] < 1e-4


def test_the_witness_sees_a_single_row(steps, fake):
    head = fake.target.head
    ids = list(range(1, 200))
    states = fake.states(ids)
    none = torch.full((len(ids),), -1)
    sample = Sample("k", torch.tensor(ids), none > 0, states["aux"], states["last"], none)
    witness = Witness(head, fake.info)
    assert witness.check(fake.url, sample) is None
    sample.last[100] = sample.last[20]
    assert "nats at position 100, 99% of them by up to" in witness.check(fake.url, sample)
    sample.last[100] = torch.nan
    assert "at position 100" in witness.check(fake.url, sample)
    assert (witness.count["checked"], witness.count["failed"]) == (3, 2)


def test_fp8_is_recorded_proven_again_and_trained_on(steps):
    steps.config["store"]["codec"] = "fp8"
    steps.config["capture"] |= {"proof_share": 1.0, "witness": False}
    result = steps.capture()
    assert result["quarantined"] == 0
    assert result["proofs"]["recaptured"]["checked"] == result["samples"]
    store, heldout = steps.store(), steps.store("heldout")
    assert (store.contract.dtype, heldout.contract.dtype) == ("float8_e4m3fn", "float32")
    for i in range(len(store)):
        sample = store.sample(i)
        kept = torch.cat([sample.answer[1:], torch.zeros(1, dtype=torch.bool)])
        assert torch.equal(~sample.last.isnan().any(1), kept)
        assert torch.equal(sample.argmax[:-1][kept[:-1]], sample.ids[1:][kept[:-1]])
    assert not any(heldout.sample(i).last.isnan().any() for i in range(len(heldout)))
    steps.run("vocabulary", vocabulary.run, "target", "capture")
    assert steps.run("train", train.run, "target", "capture", "vocabulary")["loss"] > 0
