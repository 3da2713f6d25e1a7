"""Captures from real SGLang against transformers, in float32: every row of every request, nothing else's."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import configs
from eyas.engines.sglang import client, info, twinconfig, twinmodel
from eyas.engines.sglang.capturefile import read
from eyas.engines.sglang.plugin.protocol import Wanted
from eyas.engines.sglang.server import Running

TOLERANCE = 1e-5
LENGTHS = [1, 2, 3, 5, 17, 63, 64, 65, 127, 128, 129, 257]


@dataclass
class Served:
    """A server and the same model in transformers."""

    running: Running
    info: info.ServerInfo
    reference: Any
    layers: tuple[int, int, int]

    @property
    def vocab(self) -> int:
        size: int = self.reference.config.vocab_size
        return size

    def samples(self, count: int, seed: int) -> list[list[int]]:
        """Mixed lengths around chunk sizes, a third behind a shared prefix, every eighth the same as the one before."""
        rng = random.Random(seed)
        prefix = [rng.randrange(self.vocab) for _ in range(70)]
        made: list[list[int]] = []
        for i in range(count):
            ids = [rng.randrange(self.vocab) for _ in range(rng.choice(LENGTHS))]
            made.append(made[-1] if i % 8 == 7 else prefix + ids if i % 3 == 0 else ids)
        return made

    def capture(self, samples: list[list[int]]) -> list[client.Reply]:
        """All of them, 64 at once; in order."""
        requests = [client.Request(Wanted(f"s{i}", len(ids)), ids) for i, ids in enumerate(samples)]
        got = list(
            client.capture([self.running.endpoint], requests, info=self.info, concurrency=64, vocab_size=self.vocab)
        )
        assert not [lost for lost in got if isinstance(lost, client.Lost)]
        replies = {reply.request.wanted.name: reply for reply in got if isinstance(reply, client.Reply)}
        assert len(replies) == len(samples)
        return [replies[request.wanted.name] for request in requests]

    @torch.no_grad()
    def compare(self, replies: list[client.Reply]) -> None:
        """Each row of each layer within TOLERANCE of transformers'; the file's ids and the server's token are right."""
        root = self.running.endpoint.root
        assert root is not None
        known: dict[tuple[int, ...], Any] = {}  # the same prompt twice is computed once
        for reply in replies:
            got = read(reply.path, root)
            reply.path.unlink()
            assert got.ids.tolist() == reply.request.ids
            assert got.layers == self.layers
            key = tuple(reply.request.ids)
            if key not in known:
                known[key] = self.reference(torch.tensor([key]), output_hidden_states=True)
            out = known[key]
            wanted = [*(out.hidden_states[layer][0] for layer in self.layers), out.hidden_states[-1][0]]
            for mine, theirs in zip([*got.aux.chunk(3, -1), got.last], wanted, strict=True):
                errors = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)
                assert float(errors.max()) <= TOLERANCE, reply.request.wanted
            assert reply.token == int(out.logits[0, -1].argmax())
            assert reply.cached == 0
        assert not list(root.iterdir()), "something was left in the capture root"


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(serve: Callable[..., Any], smollm2: Path) -> Iterator[Served]:
    """SmolLM2-135M: chunks of 128, prefix cache on."""
    with serve(smollm2, chunked_prefill_size=128) as running:
        yield Served(running, info.read(running.endpoint.url), reference(smollm2), (2, 15, 27))


@pytest.fixture(scope="module")
def deepseek(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Random, MLA and MoE, of DeepSeek V3's class, twelve layers: chunks of 64, prefix cache off, layers of choice."""
    folder, layers = tmp_path_factory.mktemp("deepseek"), (3, 6, 10)
    config = {**configs.DEEPSEEK_V3, "num_hidden_layers": 12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twinconfig, "LAYERS", 12)
        model = twinmodel.make(configs.info(config, folder), folder / "model", tp=1).info.folder
    with serve(model, layers=layers, chunked_prefill_size=64, disable_radix_cache=True) as running:
        yield Served(running, info.read(running.endpoint.url), reference(model), layers)


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_captures_equal_transformers_under_load(model: str, request: pytest.FixtureRequest) -> None:
    """64 at once, mixed lengths, shared prefixes, the same prompt twice, plain requests in between."""
    served: Served = request.getfixturevalue(model)
    over = threading.Event()

    def plain() -> None:
        rng = random.Random(1)
        while not over.is_set():
            ids = [rng.randrange(served.vocab) for _ in range(rng.choice(LENGTHS))]
            body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
            assert len(client.generate(served.running.endpoint.url, body)["output_ids"]) == 3
            over.wait(0.5)

    threads = [threading.Thread(target=plain) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        replies = served.capture(served.samples(64, seed=0))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    served.compare(replies)


def test_what_the_server_says_of_itself(llama: Served, deepseek: Served) -> None:
    assert (llama.info.chunk, llama.info.radix, llama.info.speculative) == (128, True, None)
    assert (deepseek.info.chunk, deepseek.info.radix) == (64, False)
    assert llama.info.version == "0.5.23"
    assert llama.info.vocab_size == 49152


def test_a_cached_prefix_is_noticed(llama: Served) -> None:
    """Without a key of its own a request is answered from the cache: said, instead of giving fewer rows."""
    root = llama.running.endpoint.root
    assert root is not None
    ids = llama.samples(1, seed=5)[0] + [7] * 100
    sampling = {"temperature": 0, "max_new_tokens": 1}
    for name in ("first", "second"):
        wanted = Wanted(name, len(ids))
        body = {"input_ids": ids, "sampling_params": sampling, "rid": wanted.rid}
        client.generate(llama.running.endpoint.url, body)
    assert wanted.failed(root).exists()
    assert "prefix cache" in wanted.failed(root).read_text()
    for left in root.iterdir():
        left.unlink()
