"""The twin step: capture and draft serving are proven on a tiny model before the target is ever loaded.

Hooks that do not fit a model class or a custom build of SGLang are found here, in about a minute, in the user's own
interpreter and with the user's own flags. Captured states are compared with transformers, layer by layer: each has to
be the layer that it is called, and its neighbours have to be clearly others. Then a random draft is served.
"""

import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import Capture, Flag, Server, Target
from eyas.engines import target as targets
from eyas.engines.layers import default_layers, resolve
from eyas.engines.sglang import client, info, server, twinmodel
from eyas.engines.sglang.checks import Check, Tally, collect, random_ids
from eyas.engines.sglang.loader import Loader
from eyas.engines.sglang.plugin.protocol import status_file
from eyas.engines.sglang.twinmodel import Twin
from eyas.engines.sglang.twinproofs import Proven, identity, judge
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json
from eyas.progress import Progress
from eyas.spec import StepSpec

CHUNK = 64
LENGTHS = (1, 5, 30, 63, 64, 65, 130, 200)
AT_ONCE = 16
CUSTOM = (3, 5, 6)
"""Layers of a twin whose target does not have the default ones."""
PROMPTS, TOKENS, DRAFT_TOKENS = 4, 16, 3
SIZE_FLAGS = frozenset(
    {
        "chat-template", "chunked-prefill-size", "context-length", "data-parallel-size", "dp", "dp-size",
        "json-model-override-args", "kv-cache-dtype", "load-format", "max-prefill-tokens", "max-running-requests",
        "max-total-tokens", "mem-fraction-static", "quantization", "reasoning-parser", "revision", "tokenizer-path",
        "tool-call-parser", "warmups",
    }
)  # fmt: skip
"""Flags that are about the target's size, weights or text, none of which a twin has."""


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Raises UserError that names the first failed check and its remedy."""
    began = time.monotonic()
    target = targets.read(spec.inputs["target"])
    work = out / "twin"
    found = prove(
        target,
        spec.section(Server),
        work,
        progress,
        dtype=spec.section(Target).dtype,
        layers=custom_layers(spec.section(Capture), target),
    )
    require(found.checks, "the tiny twin")
    shutil.rmtree(work, ignore_errors=True)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "architecture": target.architecture,
        "layers": found.layers,
        "exact": found.exact,
        "checks": [check.to_json() for check in found.checks],
    }


def require(checks: list[Check], where: str) -> None:
    """Raises UserError for the first failed check."""
    for check in checks:
        if check.passed is False:
            raise UserError(f"{where}: {check.name} failed: {check.detail}: {check.remedy}")


def custom_layers(capture: Capture, target: TargetInfo) -> tuple[int, int, int] | None:
    """The layers that a run wants of its target, None for the default ones. Raises UserError."""
    layers = resolve(capture.layers, capture.convention, target.num_layers)
    return None if target.num_layers > 6 and layers == default_layers(target.num_layers) else layers


def prove(
    target: TargetInfo,
    config: Server,
    folder: Path,
    progress: Progress,
    *,
    dtype: str = "auto",
    layers: tuple[int, int, int] | None = None,
    draft: bool = True,
) -> Proven:
    """Make the twin of a target in `folder`, start it as `config` says, prove capture and, with `draft`, draft serving.

    `layers`: hidden_states indices of the target, None for the default ones. Failures are in the checks; raises
    UserError only where no twin can be made.
    """
    progress.milestone("making the tiny twin")
    shutil.rmtree(folder, ignore_errors=True)
    twin = twinmodel.make(target, folder / "model", config.tp)
    if layers is not None and target.num_layers > twin.info.num_layers:
        layers = CUSTOM
    proof = _Proof(twin, twin_server(config, target, twin), dtype, layers, folder, progress)
    for name, stage in [("captured from", proof.capture), ("served with a draft", proof.serve)][: 1 + draft]:
        try:
            stage()
        except (UserError, client.ServerDied) as error:
            remedy = "the target would fare alike; mend server.args, or set server.twin to false to go on without"
            proof.found.checks.append(Check(f"the twin is {name}", False, str(error), remedy))
        if any(check.passed is False for check in proof.found.checks):
            break
    return proof.found


def twin_server(config: Server, target: TargetInfo, twin: Twin) -> Server:
    """The run file's server, for the twin: the same interpreter, environment and flags, but those about size."""
    args: dict[str, Flag | None] = {name: value for name, value in config.args.items() if name not in SIZE_FLAGS}
    page = config.args.get("page-size")
    args |= {
        "chunked-prefill-size": max(CHUNK, page if isinstance(page, int) else 0),
        "max-total-tokens": 20000,
        "max-running-requests": 32,
        "skip-tokenizer-init": True,
    }
    if args.get("device") != "cpu":
        args["mem-fraction-static"] = 0.5
    if twin.reference is None:
        args["load-format"] = "dummy"
    if "text_config" in target.config:
        args["tokenizer-path"] = str(target.folder)
    captures = config.captures if isinstance(config.captures, str) else None
    return config.model_copy(update={"args": args, "port": None, "url": None, "captures": captures})


def twin_prompts(vocab_size: int) -> dict[str, list[int]]:
    """Prompts of mixed lengths around the chunk size, two with a shared prefix, one twice."""
    long = random_ids(max(LENGTHS), vocab_size, 0)
    prompts = {f"length-{n}": random_ids(n, vocab_size, n) for n in LENGTHS[:-1]} | {f"length-{LENGTHS[-1]}": long}
    return prompts | {"again": long, "prefix-a": long[:100], "prefix-b": [*long[:90], *random_ids(10, vocab_size, 1)]}


@dataclass
class _Proof:
    """What is done with one twin."""

    twin: Twin
    config: Server
    dtype: str
    layers: tuple[int, int, int] | None
    folder: Path
    progress: Progress

    def __post_init__(self) -> None:
        self.found = Proven()
        self.prompts = twin_prompts(self.twin.info.vocab_size)
        self.asked = list(self.prompts.values())[-PROMPTS:]
        """Prompts that are answered, with and without a draft."""
        self.answers: list[list[int]] = []
        self.exact = False
        """Whether the server computes in float32."""

    def capture(self) -> None:
        """Capture from the twin, compare with transformers, and note what it answers without a draft."""
        twin, size = self.twin, self.twin.info.vocab_size
        with self._started("capture", layers=self.layers) as running:
            endpoint = running.endpoint
            assert endpoint.status is not None
            said = read_json(status_file(endpoint.status, 0))
            self.exact = said["dtype"] == "float32"
            detail = f"{said['model']}, {twin.info.num_layers} layers, in {running.seconds['start']:.0f} s"
            self.found.checks.append(Check("the twin starts", True, "; ".join([detail, *twin.notes])))
            self.progress.milestone("capturing from the twin")
            tally = Tally(size, twin.reference.lm_head.weight if twin.reference is not None else None)
            asked = info.read(endpoint.url)
            info.require_capturable(asked, max(map(len, self.prompts)), size)
            samples = collect(endpoint, self.prompts, asked, tally, concurrency=AT_ONCE, vocab_size=size)
            self.found.checks += tally.checks()
            self.answers = greedy(endpoint.url, self.asked)[0]
        if twin.reference is None:
            self.found.checks.append(Check("each layer is the one it is called", None, "; ".join(twin.notes)))
        else:
            wanted = self.layers or default_layers(twin.info.num_layers)
            self.found.checks += identity(twin.reference, samples, wanted, said["device"], self.found)

    def serve(self) -> None:
        """Serve the twin with a random draft: the same answers."""
        self.progress.milestone("serving the twin with a random draft")
        twinmodel.write_draft(self.twin, self.config.tp, self.layers, self.folder / "draft")
        draft = server.Draft(self.folder / "draft", DRAFT_TOKENS)
        loader = Loader(draft.folder, self.config.python, self.config.env)  # answers while the server starts
        try:
            with self._started("served", capture=False, draft=draft) as running:
                drafted, verified = greedy(running.endpoint.url, self.asked)
            self.found.checks.append(loader.check())
        finally:
            loader.stop()
        name = "a draft is served, answers unchanged"
        if verified:
            self.found.checks.append(judge(name, self.twin, self.asked, self.answers, drafted, self.exact))
        else:
            remedy = "this build of SGLang does not speculate with EAGLE3 for this class"
            self.found.checks.append(Check(name, False, "the server took the draft and verified nothing", remedy))

    def _started(self, name: str, **how: Any) -> AbstractContextManager[server.Running]:
        model, folder = self.twin.info.folder, self.folder / name
        return server.started(self.config, model, self.dtype, folder, self.progress, **how)


def greedy(url: str, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Greedy answers to prompts, and how many passes verified drafts for them."""
    answers, verified = [], 0
    for ids in prompts:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        reply = client.generate(url, {"input_ids": ids, "sampling_params": sampling})
        answers.append([int(token) for token in reply["output_ids"]])
        verified += int(reply["meta_info"].get("spec_verify_ct") or 0)
    return answers, verified
