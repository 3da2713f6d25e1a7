"""The run file: what a run is to do, complete and checked before anything starts.

A run file is YAML; `a.b=value` overrides on the command line change single fields (values are YAML too). Unknown keys
are refused with the nearest right one, so that a typing error never becomes a default that nobody chose.
"""

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from eyas.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-3 is a number, and a key that is written twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


EXPONENT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
LONGEST = 1_000_000
"""Characters of a run file at most, so that a device or a model file by mistake does not fill memory."""
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""ValueError: a date that there is not, such as 2026-02-31."""


def _at_home(value: str) -> str:
    """`~/x` written out, so that every reader means the same file."""
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError as error:
        raise ValueError(str(error)) from error


FileOrName = Annotated[str, Field(min_length=1), AfterValidator(_at_home)]


class Section(BaseModel):
    """Strict, immutable part of a run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Target(Section):
    """The model that is served and gets a drafter."""

    model: FileOrName
    """A folder with config.json, tokenizer and safetensors, or the name of a model that eyas can fetch itself."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the processor multiplies it natively, else float32."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Given to the chat template everywhere: answers, capture, bench."""


class Engine(Section):
    """How the target is run."""

    kind: Literal["transformers", "sglang"] = "transformers"
    """transformers: in this process. sglang: by a server, see `server`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of all that runs in-process: training and replay too."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; default: all that this process may use."""


Flag = bool | int | float | str | list[int | float | str]


_PIPELINE = "no process of a pipeline sees all layers: use server.tp"
_REFUSED = {
    "nnodes": "a server over several machines cannot be captured from yet",
    "pp-size": _PIPELINE,
    "pipeline-parallel-size": _PIPELINE,
    "disaggregation-mode": "prefill and decode in separate servers cannot be captured from",
}
"""Flags of a server that one process on one machine could not be captured from, and why."""


class Server(Section):
    """The SGLang server, for engine.kind sglang: one that eyas launches, or existing ones by `url`."""

    url: str | list[str] | None = None
    """Existing servers. Each was started with the plugin (`eyas plugin` says how)."""
    captures: list[FileOrName] | FileOrName | None = None
    """Capture root of each existing server, as given to `eyas plugin`; for a launched one: where to make the root."""
    python: FileOrName = "python3"
    """The interpreter that has SGLang."""
    args: dict[str, Flag | None] = {}
    """Flags of sglang.launch_server without the dashes (`mem-fraction-static: 0.9`); true: the flag alone."""
    env: dict[str, str] = {}
    """Environment of the server, added to this process's."""
    tp: int = Field(default=1, ge=1)
    port: int | None = Field(default=None, ge=1, le=65535)
    """Default: a free one."""
    patience: float = Field(default=900.0, gt=0)
    """Seconds without anything new in the log after which a start is given up."""
    concurrency: int = Field(default=64, ge=1)
    """Most requests under way at once, to each server."""
    staging_mib: int = Field(default=1024, ge=16)
    """Pinned memory in the server for states on their way to a file."""
    trust_remote_code: bool = False
    """Let the server run code that comes with the model."""
    twin: bool = True
    """Prove capture and draft serving on a tiny model of the target's class before the target is loaded."""

    @field_validator("args")
    @classmethod
    def _own_flags(cls, value: dict[str, Flag | None]) -> dict[str, Flag | None]:
        own = {"model-path": "target.model", "model": "target.model", "tp": "server.tp", "tp-size": "server.tp",
               "tensor-parallel-size": "server.tp", "port": "server.port", "dtype": "target.dtype",
               "trust-remote-code": "server.trust_remote_code"}  # fmt: skip
        for name in value:
            if name.startswith("-") or "_" in name:
                raise ValueError(f"{name}: write flags without leading dashes and with dashes inside")
            if name in own:
                raise ValueError(f"{name} has a field of its own, {own[name]}")
            if name.startswith("speculative-"):
                raise ValueError(f"{name}: the target is served without a draft; eyas adds it where it is wanted")
            if name.startswith("ssl-"):
                raise ValueError(f"{name}: eyas asks without TLS, and the server listens on this machine only")
        for name, why in _REFUSED.items():
            if value.get(name) not in (None, False, 1, "1", "null"):
                raise ValueError(f"{name}: {why}")
        return value


class Data(Section):
    """How data are read, wherever they are (docs/data.md)."""

    max_rejected: float = Field(default=0.05, ge=0, le=1)
    """Above this share of rows that cannot be used, the step fails."""


class Prompts(Section):
    """What the target is asked: `builtin`, or a file, folder, glob or data set of conversations (docs/data.md)."""

    train: FileOrName = "builtin"
    heldout: FileOrName = "builtin"
    train_limit: int | None = Field(default=None, ge=1)
    heldout_limit: int | None = Field(default=None, ge=1)


class Answers(Section):
    """The target's own greedy answers: what the draft learns to predict."""

    max_new_tokens: int = Field(default=128, ge=2)
    heldout_max_new_tokens: int | None = Field(default=None, ge=2)
    """For the held-out prompts; default: the same."""
    heldout_dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Of the target on held-out prompts: only in float32 is "lossless" a matter of equal tokens."""
    batch: int = Field(default=64, ge=1)
    """Rows decoded at once."""


class Capture(Section):
    """Which hidden states are taken, how they are stored and how they are proven."""

    convention: Literal["hidden_states", "layer_output", "sglang"] = "hidden_states"
    """What explicit ids mean: positions in the list of all hidden states (0: the embedding); layers from 0, whose
    output is taken; or what a (patched) SGLang prints as its `layers_to_capture`, before which it takes the state."""
    layers: Literal["default"] | list[int] = "default"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the training features; held-out ones keep the target's. auto: the target's."""
    proof_share: float = Field(default=0.02, gt=0, le=1)
    """Share of the samples that are captured again, alone, and compared."""
    max_quarantined: float = Field(default=0.01, ge=0, lt=1)
    """Above this share of failed samples the run stops."""
    witness: bool = False
    """Compare with the server's own log-probabilities too, for the samples that are captured again (SGLang)."""

    @field_validator("layers")
    @classmethod
    def _three_layers(cls, value: str | list[int], info: ValidationInfo) -> str | list[int]:
        if isinstance(value, str):
            return value
        if len(value) != 3 or len(set(value)) != 3:
            raise ValueError("EAGLE-3 takes three different layers")
        if min(value) < 0:
            raise ValueError("ids count from 0")
        if 0 in value and info.data.get("convention") == "hidden_states":
            raise ValueError(
                "0 is the embedding under hidden_states, which SGLang cannot be told to take: it counts the outputs of "
                "layers, and this would be -1"
            )
        return value


class Store(Section):
    """How captured states are kept (docs/store.md)."""

    codec: Literal["bf16", "fp8"] = "bf16"
    """Of the training features. bf16: as they were captured (`capture.dtype`), without loss; fp8: in half the bytes."""
    shard_mib: int = Field(default=1024, ge=1)
    """Size of the files; one larger sample has a file of its own."""
    keep: Literal["always", "until_verified"] | Annotated[int, Field(ge=0)] = "always"
    """Until when the states of a finished run are kept; a number: days."""


class Draft(Section):
    """The EAGLE-3 layer."""

    vocab_size: int | Literal["full"] = 32000
    start: FileOrName = "fitted"
    """fitted: begin with weights fitted to the captured states (a ridge regression); random: what the recipe asks; or
    the folder of an existing draft, to go on with its weights, vocabulary and switches."""
    fc_norm: bool = False
    norm_output: bool = False
    """EAGLE-3.1's two switches."""

    @property
    def existing(self) -> str | None:
        """Folder of the draft that training begins with, if it does with one."""
        return None if self.start in ("fitted", "random") else self.start

    @field_validator("vocab_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or 'full'")
        return value


class Train(Section):
    """Test-time training of the draft."""

    ttt_steps: int = Field(default=7, ge=1, le=16)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    temperature: float = Field(default=1.0, gt=0)
    """Of the target's distributions that the draft learns; below 1 they come nearer to its greedy choice."""
    epochs: float = Field(default=2.0, ge=0.01)
    batch_tokens: int = Field(default=8192, ge=16)
    """Tokens of packed samples to one optimizer step, over all ranks."""
    micro_tokens: int = Field(default=16384, ge=16)
    """Tokens packed together on one device; a batch of more is accumulated. A longer sample stands alone."""
    ranks: int | None = Field(default=None, ge=1, le=64)
    """Processes that train together, a GPU each; default: one for each GPU, one without."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the layer's matrices; fewer tokens to the same draft, more arithmetic a step."""
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup: float = Field(default=0.015, ge=0, lt=1)
    """Share of the steps."""
    final_learning_rate: float = Field(default=0.02, ge=0, le=1)
    """Floor of the cosine, as a share of learning_rate."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    checkpoints: int = Field(default=10, ge=1)
    """How many times the state is saved, evenly spread."""
    evaluations: int = Field(default=4, ge=1)
    """How many times held-out acceptance is measured, evenly spread, the end included."""


class Decode(Section):
    """Speculative decoding on the held-out prompts."""

    draft_tokens: int = Field(default=3, ge=1, le=16)
    batch: int = Field(default=32, ge=1)
    prompts: int | None = Field(default=None, ge=1)
    """How many held-out prompts are decoded with the draft; default: all."""
    timing_tokens: int = Field(default=48, ge=2)
    """Longest answer that is timed."""
    timing_prompts: int = Field(default=8, ge=1)
    """How many are timed one by one, with and without the draft, interleaved."""


class Bench(Section):
    """The served figures, with and without the draft (SGLang)."""

    concurrencies: list[Annotated[int, Field(ge=1, le=1024)]] = Field(default=[1], min_length=1)
    """Requests under way at once; each is measured with and without the draft."""
    workloads: list[FileOrName] = Field(default=["heldout"], min_length=1)
    """`heldout`, `humaneval` (its package), a .jsonl or .txt file of prompts; `@4096` behind a name: each prompt behind
    as much other text as makes it that many tokens long."""
    prompts: int = Field(default=16, ge=3)
    """How many of each workload are asked in a round."""
    max_new_tokens: int = Field(default=128, ge=2)
    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = Field(default=[0.0], min_length=1)
    rounds: int = Field(default=3, ge=2)
    """How often each figure is taken: its interval comes from their spread."""
    again: bool = True
    """Load the plain server once more after the draft's and measure it again, so that a drift is seen."""
    break_even: bool = False
    """Serve a draft of random weights before any training, a load more: what must a draft reach to pay here?"""
    sweep: list[Annotated[int, Field(ge=1, le=16)]] = []
    """Draft tokens a step to weigh beside decode.draft_tokens; the best predicted are measured, a load each."""
    max_loads: int = Field(default=10, ge=0)
    """Server loads that tuning and the sweep may take together, beyond those that a run needs anyway."""


LATENCY = "latency"
GOAL = re.compile(r"latency|throughput@([1-9]\d{0,3})")


class Tune(Section):
    """The search for the target's best plain configuration (`eyas tune`; SGLang, launched). `bench` says with which
    prompts and rounds, and how many loads at most."""

    goal: str | None = None
    """`latency` (one request at a time), `throughput@N` (N at a time), or several joined by +, of equal weight. Where
    it is stated, `eyas run` tunes first and serves with what it found; `eyas tune` takes latency by default."""
    options: list[str] = []
    """Only these, by the names of the table that `eyas tune` prints; empty: all that can matter."""
    lossy: bool = False
    """Try what may change answers too: the KV cache in fp8."""
    deadline: float = Field(default=1800.0, gt=0)
    """Seconds for one trial, its server's start included."""

    @field_validator("goal")
    @classmethod
    def _known_goal(cls, value: str | None) -> str | None:
        for part in value.split("+") if value is not None else []:
            if not GOAL.fullmatch(part.strip()):
                raise ValueError(
                    f"unknown goal {part.strip()!r}: write latency, throughput@16, or both as latency+throughput@16"
                )
        return value

    @property
    def concurrencies(self) -> list[int]:
        """Requests under way at once, of each part of the goal."""
        found = [GOAL.fullmatch(part.strip()) for part in (self.goal or LATENCY).split("+")]
        return sorted({int(match[1] or 1) for match in found if match})


class Pilot(Section):
    """A small run of everything before the full one (SGLang, launched)."""

    samples: int = Field(default=300, ge=0)
    """Training prompts of the pilot; 0: none. A run of fewer than four times as many needs none."""
    require: bool = True
    """Stop the run where the pilot says that the draft cannot pay, or is not served as predicted."""


class RunConfig(Section):
    """A whole run file."""

    name: str = Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**40)
    target: Target
    engine: Engine = Engine()
    server: Server = Server()
    data: Data = Data()
    prompts: Prompts = Prompts()
    answers: Answers = Answers()
    capture: Capture = Capture()
    store: Store = Store()
    draft: Draft = Draft()
    train: Train = Train()
    decode: Decode = Decode()
    bench: Bench = Bench()
    tune: Tune = Tune()
    pilot: Pilot = Pilot()
    drafts: list[FileOrName] = []
    """Existing drafts (folders) whose acceptance is predicted before anything is trained."""

    @model_validator(mode="before")
    @classmethod
    def _left_empty(cls, data: Any) -> Any:
        """A section of which only the heading is there holds the defaults."""
        if not isinstance(data, Mapping):
            return data
        sections = {name for name, info in cls.model_fields.items() if _is_section(info.annotation)}
        return {name: {} if value is None and name in sections else value for name, value in data.items()}


TUNING_LOADS = 4
"""The fewest that tuning takes: the default, one other setting, and both once more to confirm it."""


def require_tunable(config: RunConfig) -> None:
    """Raises UserError: nothing that eyas starts with SGLang, or too few loads."""
    if config.engine.kind != "sglang":
        raise UserError(f"engine.kind is {config.engine.kind}; tuning is for SGLang: set engine.kind=sglang")
    if config.server.url is not None:
        raise UserError("server.url: a server that runs already cannot be tuned: leave it out, so that eyas starts one")
    if config.bench.max_loads < TUNING_LOADS:
        raise UserError(
            f"bench.max_loads is {config.bench.max_loads}: tuning takes at least {TUNING_LOADS}: the default, one "
            "other setting, and both once more to confirm it"
        )


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `a.b=value` overrides.

    Raises UserError: file missing, not YAML, unknown key, wrong type or value.
    """
    return parse(read(path, overrides), str(path))


def read(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """What a run file says, overrides applied and nothing else checked. Raises UserError: missing, not YAML."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the run file ({error.strerror}); see recipes/ for examples") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the run file is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if len(text) > LONGEST:
        raise UserError(f"{path}: longer than a run file can be (a million characters); see recipes/ for examples")
    try:
        data = yaml.load(text, _Loader)
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: a run file is a mapping (name: …, target: …); see recipes/demo.yaml")
    for override in overrides or []:
        _override(data, override)
    return data


def parse(data: dict[str, Any], where: str) -> RunConfig:
    """Check the content of a run file; `where` names it in errors. Raises UserError."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(error))) from error


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write it as key.key=value, for example train.epochs=3")
    *parents, last = key.split(".")
    for parent in parents:
        if data.get(parent) is None:
            data[parent] = {}
        child = data[parent]
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent} is a single value, not a section")
        data = child
    try:
        data[last] = yaml.load(value, _Loader)
    except NOT_YAML as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def _explain(error: ValidationError) -> Iterator[str]:
    """The errors in a run file's own words, one text a field."""
    wrong: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for entry in error.errors():
        steps = [str(step) for step in entry["loc"]]
        if entry["type"] == "extra_forbidden":
            yield _unknown(steps)
        elif entry["type"] == "missing":
            yield f"{'.'.join(steps)} is missing"
        elif not steps:
            yield entry["msg"].removeprefix("Value error, ")
        else:
            # Below section and field stand the names of the types that were tried.
            where = ".".join(steps[:2])
            message = entry["msg"].removeprefix("Value error, ").removeprefix("Input ")
            wrong.setdefault(where, []).append(message)
            got.setdefault(where, reprlib.repr(entry["input"]))
    for where, messages in wrong.items():
        yield f"{where}: {' or '.join(dict.fromkeys(messages))} (got {got[where]})"


def _unknown(steps: list[str]) -> str:
    section: Any = RunConfig
    for step in steps[:-1]:
        section = section.model_fields[step].annotation
    known = list(section.model_fields)
    near = difflib.get_close_matches(steps[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*steps[:-1], near[0]])}?" if near else "known here: " + ", ".join(known)
    return f"unknown key {'.'.join(steps)}; {hint}"
