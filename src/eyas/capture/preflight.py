"""Before a server captures thousands of samples: is the plugin there, is there room, do all ranks say the same?"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.capture.proofs import recaptured
from eyas.engines.sglang import capturefile, client
from eyas.engines.sglang.checks import to_sample
from eyas.engines.sglang.client import Lost, Request
from eyas.engines.sglang.info import ServerInfo
from eyas.engines.sglang.plugin.protocol import Wanted, status_file
from eyas.engines.sglang.server import Endpoint
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json
from eyas.room import size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REMEDY = "start the server with the lines that `eyas plugin` prints, or let eyas launch it"


def require_plugin(
    endpoint: Endpoint, about: ServerInfo, target: TargetInfo, layers: tuple[int, int, int]
) -> dict[str, Any]:
    """What the first rank says of itself. Raises UserError: a rank that has not loaded the plugin, or captures other
    layers or another model than the run file means."""
    where = endpoint.url
    if endpoint.root is None or endpoint.status is None:
        raise UserError(f"{where}: the plugin is not loaded: {REMEDY}")
    wanted: dict[str, Any] = {
        "layers": list(layers),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
    }
    first: dict[str, Any] = {}
    for rank in range(about.tp):
        path = status_file(endpoint.status, rank)
        try:
            said = read_json(path)
        except OSError as error:
            raise UserError(f"{where}: the plugin is not loaded: rank {rank} wrote no {path}: {REMEDY}") from error
        if said.get("problem"):
            raise UserError(f"{where}: the plugin cannot capture here, rank {rank} says: {said['problem']}")
        for name, value in wanted.items():
            if said.get(name) != value:
                raise UserError(
                    f"{where}: the plugin in rank {rank} has {name} {said.get(name)}, the run file means {value}: "
                    "name the same model and layers, and start the server again"
                )
        first = first or said
    if first.get("dtype") not in DTYPES:
        raise UserError(f"{where}: serves in {first.get('dtype')}: set target.dtype to bfloat16 or float32")
    return first


def require_space(roots: Sequence[Path], out: Path, under_way: int, states: int, token: int) -> str:
    """Room for `under_way` bytes of captures under each root, and for `states` bytes, `token` each, where the shards
    go. Returns the figures in a line.

    Raises UserError: the folder, what is free and what is needed [Model-Optimizer PR 2080, h2o-llmstudio 214].
    """
    told = [f"states: {token:,} bytes a token, {size(states)} to come"]
    for folder, needed, why in [
        *((root, under_way, "captures on their way") for root in roots),
        (out, states, "the states of this run"),
    ]:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"{folder}: {size(free)} are free, {why} need {size(needed)}: free some space"
                + (", or name another folder in server.captures" if folder in roots else ", or set store.codec: fp8")
            )
        told.append(f"{size(free)} free in {folder}")
    return ", ".join(told)


def require_equal_ranks(endpoint: Endpoint, about: ServerInfo, request: Request, vocab_size: int) -> None:
    """Every tensor-parallel rank gives the same states of one request: partial sums, which the greedy-token proof does
    not see in the aux states, would differ [sglang 28343]. Shows by the way that the hooks fire. Raises UserError."""
    assert endpoint.root is not None
    wanted = Wanted(request.wanted.name, request.wanted.tokens, every_rank=True)
    asked = Request(wanted, request.ids)
    (reply,) = client.capture([endpoint], [asked], info=about, concurrency=1, vocab_size=vocab_size)
    if isinstance(reply, Lost):
        raise UserError(f"{endpoint.url}: the first capture failed: {reply.reason}")
    wanted = replace(wanted, name=reply.path.name.removesuffix(".rank0.safetensors"))
    try:
        ranks = [capturefile.read(wanted.file(endpoint.root, rank), endpoint.root) for rank in range(about.tp)]
        samples = [to_sample(wanted.name, captured, reply.token) for captured in ranks]
        for rank, sample in enumerate(samples[1:], 1):
            reason, _ = recaptured(sample, samples[0])
            if reason:
                raise UserError(
                    f"{endpoint.url}: tensor-parallel ranks 0 and {rank} have other states of one request ({reason}): "
                    "they are partial sums, which no draft can be trained on; use server.tp 1 or another SGLang"
                )
    finally:
        client.discard(wanted, endpoint.root, about.tp)
