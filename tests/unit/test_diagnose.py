"""Planted faults are named: the draft is really served with each, by decoding with it, and replay has to tell which.

Decoding (`decode/chain.py`) and the variants (`bench/variants.py`) share no code that makes a fault.
"""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from eyas import cli
from eyas.bench import cases, verdict
from eyas.bench.diagnose import diagnose
from eyas.bench.evidence import observed
from eyas.bench.variants import OWN, all_of, nearest
from eyas.capture import step as capture
from eyas.corpus.read import read
from eyas.corpus.render import Renderer
from eyas.decode import replay
from eyas.decode import step as decode_step
from eyas.decode.chain import decode
from eyas.decode.replay import load_draft, pooled
from eyas.draft import export, vocabulary
from eyas.draft.model import DraftModel
from eyas.engines import answers, weights
from eyas.engines import target as targets
from eyas.engines.inprocess.target import InProcessTarget, Pass
from eyas.errors import UserError
from eyas.files import write_json
from eyas.progress import Silent
from eyas.train import step as train_step
from test_steps import Graph
from trained import CPU, LAYERS, TOKENS, train

DRAFT_TOKENS = 3


@pytest.fixture(scope="module")
def learned(tiny_llama, tmp_path_factory):
    return train(tiny_llama, tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="module")
def stretched(tiny_llama, tmp_path_factory):
    """For a target with scaled rotary embeddings."""
    folder = tmp_path_factory.mktemp("stretched")
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return train(copy(tiny_llama, folder / "model", rope_parameters=rope), folder)


def copy(folder, to, **fields):
    """A copy of a model folder or a draft with other fields in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def tensors(folder, change):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    change(state)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return folder


def loaded(learned, folder):
    return load_draft(folder, learned.target.info, torch.float32, CPU, anyway=True)


def serve(learned, draft=None, layers=LAYERS, target=None):
    """The rows as they are served by a server that takes `layers` and has loaded `draft`."""
    target = target or InProcessTarget(learned.target.info, layers, torch.float32, CPU)
    prompts = [row.ids[: row.prompt] for row in learned.rows]
    done = decode(target, draft or learned.draft, prompts, TOKENS, DRAFT_TOKENS)
    assert [one.ids for one in done] == [row.ids for row in learned.rows], "a draft changes no answer"
    return [replace(row, served=one.tally) for row, one in zip(learned.rows, done, strict=True)]


def found(learned, rows, draft=None, named=False):
    """The diagnosis, from answer by answer and from pooled counts."""
    draft = draft or learned.draft
    variants = list(all_of(draft, learned.target.info, LAYERS, named, max(len(row.ids) for row in rows)))
    figures = observed(rows, DRAFT_TOKENS)
    return [
        diagnose(draft, LAYERS, variants, {OWN: known}, figures, DRAFT_TOKENS, Silent())
        for known in (rows, learned.rows)
    ]


def is_named(cause, by_answer, from_pooled):
    """Answer by answer no other cause is possible; pooled counts of so few answers may fit another one too."""
    assert (by_answer["cause"], by_answer["rivals"]) == (cause, [])
    assert from_pooled["cause"] == cause
    assert from_pooled["variant"] == by_answer["variant"]


def test_the_draft_is_good(learned):
    rows = serve(learned)
    assert observed(rows, DRAFT_TOKENS)["accept_length"] > 2
    for one in found(learned, rows):
        assert one["cause"] is None
        assert "nothing is wrong with it" in one["sentence"]
        assert one["trials"][0]["distance"] == 0


@pytest.mark.parametrize(
    ("layers", "named", "cause"),
    [
        ((3, 5, 6), False, "layers"),
        ((1, 3, 4), False, "layers"),
        ((2, 4, 6), False, "layers"),
        ((3, 5, 6), True, "convention"),
        ((1, 3, 4), True, "convention"),
    ],
)
def test_other_layers(learned, layers, named, cause):
    both = found(learned, serve(learned, layers=layers), named=named)
    is_named(cause, *both)
    assert str(list(layers)) in both[0]["variant"]


def test_rope_theta(learned, tmp_path):
    served = copy(learned.folder, tmp_path / "d", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    both = found(learned, serve(learned, loaded(learned, served)))
    is_named("rope_theta", *both)
    assert both[0]["variant"] == "rope_theta 500000 (theta 500000)"
    assert "theta 10000 is what config.json says" in both[0]["remedy"]


def test_rope_scaling(stretched, tmp_path):
    served = copy(stretched.folder, tmp_path / "d", rope_parameters=None, rope_scaling=None)
    both = found(stretched, serve(stretched, loaded(stretched, served)))
    is_named("rope_scaling", *both)
    assert "without rope scaling" in both[0]["variant"]


def test_no_vocabulary_map(learned, tmp_path):
    served = tensors(copy(learned.folder, tmp_path / "d"), lambda state: [state.pop("d2t"), state.pop("t2d")])
    by_answer, _ = found(learned, serve(learned, loaded(learned, served)))
    assert (by_answer["cause"], by_answer["rivals"]) == ("vocabulary_map", [])


def test_no_head(learned, tmp_path):
    served = tensors(copy(learned.folder, tmp_path / "d"), lambda state: state.pop("lm_head.weight"))
    by_answer, pooled_ = found(learned, serve(learned, loaded(learned, served)))
    for one in (by_answer, pooled_):
        assert "head" in {one["cause"], *one["rivals"]}, "a random head cannot be told from other ruins every time"


def test_the_targets_head(learned):
    head = learned.target.head[learned.draft.target_ids]
    served = loaded(learned, learned.folder)
    served.lm_head.weight.data = head.clone()
    is_named("head", *found(learned, serve(learned, served)))


class LastState(InProcessTarget):
    """As a server under EAGLE: the state that it hands to the draft is the last one."""

    def run(self, ids, cache):
        out = super().run(ids, cache)
        return Pass(out.last, torch.cat([out.last] * 3, -1))


def test_eagle_in_place_of_eagle3(learned):
    served = loaded(learned, learned.folder)
    size = served.config.hidden_size
    with torch.no_grad():
        served.fc.weight.zero_()
        served.fc.weight[:, :size] = torch.eye(size)
        served.lm_head.weight.copy_(learned.target.head[: served.config.draft_vocab_size])
    served.d2t.zero_()
    target = LastState(learned.target.info, LAYERS, torch.float32, CPU)
    both = found(learned, serve(learned, served, target=target))
    is_named("eagle", *both)
    assert "--speculative-algorithm EAGLE3" in both[0]["remedy"]


class Stuck(DraftModel):
    """A rotary table that ends at the draft's positions, whose last row serves all that lie behind."""

    def angles(self, positions, like):
        table = super().angles(torch.arange(self.config.max_position_embeddings), like)
        return tuple(part[positions.clamp(max=len(part) - 1)] for part in table)


def test_positions_beyond_the_drafts(learned, tmp_path):
    limit = min(row.prompt for row in learned.rows)
    folder = copy(learned.folder, tmp_path / "d", max_position_embeddings=limit)
    own, served = loaded(learned, folder), loaded(learned, folder)
    served.__class__ = Stuck
    both = found(learned, serve(learned, served), draft=own)
    is_named("positions", *both)
    assert f"a context length of {limit} at most" in both[0]["remedy"]


def by_files(learned, folder, target=None, **how):
    """As `eyas diagnose` does it."""
    asked = {"served": None, "revision": None, "limit": None, "draft_tokens": DRAFT_TOKENS, "max_new_tokens": TOKENS}
    model = target or learned.target.info.folder
    return cases.of_folder(folder, str(model), str(learned.prompts), progress=Silent(), **{**asked, **how})


def test_the_template(learned):
    info = learned.target.info
    render = Renderer(info, {})
    asked = [
        render.otherwise(row)["the bare text, without the chat template"]
        for row in read(str(learned.prompts), "heldout")[0]
    ]
    target = InProcessTarget(info, LAYERS, torch.float32, CPU)
    done = decode(target, learned.draft, asked, TOKENS, DRAFT_TOKENS)
    figures = pooled([(one.ids[one.prompt :], one.tally) for one in done], DRAFT_TOKENS)
    path = learned.folder.parent / "served.json"
    path.write_text(json.dumps(figures))
    one = by_files(learned, learned.folder, served=str(path))
    assert one["cause"] == "template"
    assert "the bare text" in one["variant"]


@pytest.fixture(scope="module")
def revised(learned):
    """The target after some more training: a little noise on its last layers."""
    folder = copy(learned.target.info.folder, learned.folder.parent / "revised")

    def change(state):
        generator = torch.Generator().manual_seed(1)
        for name, tensor in state.items():
            if "layers.6." in name or "layers.7." in name:
                tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return tensors(folder, change)


def test_another_revision(learned, revised):
    """The draft was trained for the target at hand, and another one is served; and the other way round."""
    info = replace(learned.target.info, folder=revised)
    target = InProcessTarget(info, LAYERS, torch.float32, CPU)
    prompts = [row.ids[: row.prompt] for row in learned.rows]
    done = decode(target, learned.draft, prompts, TOKENS, DRAFT_TOKENS)
    figures = pooled([(one.ids[one.prompt :], one.tally) for one in done], DRAFT_TOKENS)
    path = learned.folder.parent / "revised.json"
    path.write_text(json.dumps(figures))
    one = by_files(learned, learned.folder, served=str(path), revision=str(revised))
    assert one["cause"] == "revision"
    turned = by_files(learned, learned.folder, target=revised, revision=str(learned.target.info.folder))
    assert turned["cause"] == "revision"


FILES = {
    "rope_theta": lambda folder, to: copy(
        folder, to, rope_theta=1e7, rope_parameters={"rope_type": "default", "rope_theta": 1e7}
    ),
    "rope_scaling": lambda folder, to: copy(
        folder, to, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    ),
    "convention": lambda folder, to: copy(folder, to, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)}),
    "vocabulary_map": lambda folder, to: tensors(copy(folder, to), lambda state: state.pop("d2t")),
    "head": lambda folder, to: tensors(copy(folder, to), lambda state: state.pop("lm_head.weight")),
}


@pytest.mark.parametrize("cause", FILES)
def test_a_draft_that_is_wrong_as_given(learned, tmp_path, cause):
    one = by_files(learned, FILES[cause](learned.folder, tmp_path / "d"))
    assert one["cause"] == cause
    assert "accepted better with one change" in one["sentence"]
    assert bool(one["files"]) == (cause != "convention"), "its files say so too, but for ids that exist"


def test_a_map_that_is_wholly_lost_is_found_in_the_head(learned, tmp_path):
    folder = tensors(copy(learned.folder, tmp_path / "d"), lambda state: [state.pop("d2t"), state.pop("t2d")])
    one = by_files(learned, folder)
    assert one["cause"] == "vocabulary_map"
    assert "nearest to the draft's" in one["variant"]
    ids = nearest(learned.draft.lm_head.weight, learned.target.head)
    assert (ids == learned.draft.target_ids).float().mean() > 0.9


def test_a_good_draft_has_no_fault(learned):
    one = by_files(learned, learned.folder)
    assert (one["cause"], one["files"]) == (None, [])
    again = by_files(learned, learned.folder, served=str(one["trials"][0]["accept_length"]))
    assert "nothing is wrong with it" in again["sentence"]
    worse = by_files(learned, learned.folder, served="3.9")
    assert "No single fault" in worse["sentence"]


@pytest.mark.parametrize(
    ("served", "message"),
    [("5", "within 1 and 4"), ("fast", "neither an accept length nor a file"), ("0.9", "within 1 and 4")],
)
def test_figures_that_are_none(learned, served, message):
    with pytest.raises(UserError, match=message):
        cases.read_served(served, DRAFT_TOKENS, 100)


def test_what_cannot_be_used_is_refused_before_the_target_answers(learned, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "InProcessTarget", None)
    with pytest.raises(UserError, match="nor a file"):
        by_files(learned, learned.folder, served="much")
    with pytest.raises(UserError, match="no folder"):
        by_files(learned, learned.folder, revision=str(tmp_path / "nowhere"))


def test_the_command(learned, tmp_path, monkeypatch, capsys):
    folder = tensors(copy(learned.folder, tmp_path / "d"), lambda state: state.pop("d2t"))
    asked = ["--target", str(learned.target.info.folder), "--prompts", str(learned.prompts)]
    monkeypatch.setattr(sys, "argv", ["eyas", "diagnose", str(folder), *asked, "--max-new-tokens", str(TOKENS)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert not ended.value.code
    marked = [line for line in out.splitlines() if line.startswith("→")]
    assert "vocabulary_map: the vocabulary that t2d marks" in marked[0]
    assert "vocabulary_map: there is no d2t, and the draft knows 120 of 259 tokens" in out
    assert "Cause: vocabulary_map" in out
    monkeypatch.setattr(sys, "argv", ["eyas", "diagnose", str(tmp_path), *asked])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no config.json" in capsys.readouterr().err


def test_figures_from_a_file(tmp_path):
    path = tmp_path / "served.json"
    figures = {"rounds": 10, "accepted": 5, "draft_tokens": 3}
    other = {"temperature": 0.6, "acceptance": {**figures, "accepted": 9}}
    for content in (figures, {"bench": [other, {"temperature": 0.0, "acceptance": figures}]}):
        path.write_text(json.dumps(content))
        assert cases.read_served(str(path), DRAFT_TOKENS, 100) == figures
    with pytest.raises(UserError, match="set --draft-tokens 3"):
        cases.read_served(str(path), 5, 100)
    path.write_text(json.dumps({"bench": [other]}))
    with pytest.raises(UserError, match="nor a file"):
        cases.read_served(str(path), DRAFT_TOKENS, 100)


def test_a_run_whose_parity_fails_says_why(tmp_path, tiny_llama):
    """The server has lost the draft's own head; verdict names it. The held-out prompts are those that were learned."""
    graph = Graph(tmp_path / "run", tiny_llama)
    graph.root.mkdir()
    graph.config["train"] |= {"epochs": 70.0, "batch_tokens": 4096, "learning_rate": 8e-3, "evaluations": 1}
    graph.config["answers"]["max_new_tokens"] = 24
    graph.run("target", targets.run)
    graph.prompts()
    shutil.copy(graph.root / "prompts" / "train.jsonl", graph.root / "prompts" / "heldout.jsonl")
    graph.run("answers", answers.run, "target", "prompts")
    graph.run("capture", capture.run, "target", "answers")
    graph.run("vocabulary", vocabulary.run, "target", "capture")
    graph.run("train", train_step.run, "target", "capture", "vocabulary")
    graph.run("export", export.run, "target", "capture", "train")
    predicted = graph.run("replay", replay.run, "target", "capture", "export")
    assert predicted["accept_length"] > 1.5
    ids = load_draft(graph.root / "export", targets.read(graph.root / "target"), torch.float32, CPU).target_ids
    kept = shutil.copytree(graph.root / "export", tmp_path / "kept")
    tensors(
        graph.root / "export", lambda state: state.update({"lm_head.weight": weights.head(tiny_llama)[ids].clone()})
    )
    decoded = graph.run("decode", decode_step.run, "target", "capture", "export")
    decoded["predicted"] = predicted
    shutil.rmtree(graph.root / "export")
    shutil.copytree(kept, graph.root / "export")
    for name, result in graph.results.items():
        write_json(graph.root / name / "result.json", result)
    told = graph.run("verdict", verdict.run, *graph.results)
    assert told["diagnosis"]["cause"] == "head"
    assert told["deploy"]["verdict"] == "no"
    assert any(
        "the target's head in place of its own" in reason and "To mend it" in reason for reason in told["reasons"]
    )
    shutil.rmtree(graph.root / "export")
    assert (
        "could not be diagnosed" in cases.of_run(graph.spec("verdict", *graph.results), decoded, Silent())["sentence"]
    )
