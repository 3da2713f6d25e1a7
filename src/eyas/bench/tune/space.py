"""The search space: what can be set, what to, and why the rest is left out.

A factor is one thing that can be set; its settings exclude each other. A rule gives a factor's settings on this machine
or the reason why it has none. Nothing that the run file or the environment sets is tried, since somebody chose it;
nothing that changes answers, unless asked for; nothing that uses NVLink multicast (NVLS, symmetric memory), whose
faults can stop every program on the host's GPUs.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.bench.tune.machine import Machine
from eyas.config import Flag, Server, Tune
from eyas.engines.device import usable_cores
from eyas.engines.sglang.command import flags as all_flags
from eyas.errors import UserError


@dataclass(frozen=True)
class Setting:
    """What a trial adds to the run file's server; nothing: the default."""

    flags: Mapping[str, Flag] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people; tells any two settings apart."""
        flags = [name if value is True else f"{name} {value}" for name, value in self.flags.items()]
        return ", ".join([*flags, *(f"{name}={value}" for name, value in self.env.items())]) or "default"

    def __or__(self, other: "Setting") -> "Setting":
        return Setting({**self.flags, **other.flags}, {**self.env, **other.env})

    def apply(self, config: Server) -> Server:
        """The server section with it."""
        return config.model_copy(update={"args": {**config.args, **self.flags}, "env": {**config.env, **self.env}})

    def to_json(self) -> dict[str, Any]:
        """For tune.json."""
        return {"name": self.name, "flags": dict(self.flags), "env": dict(self.env)}


DEFAULT = Setting()


@dataclass(frozen=True)
class Factor:
    """One thing that can be set."""

    name: str
    settings: tuple[Setting, ...]
    """The most promising first."""
    ordered: bool = False
    """Each goes further than the one before: where one is slower, so are those behind it."""


@dataclass(frozen=True)
class LeftOut:
    """What is not tried, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Facts:
    """All that the rules look at."""

    machine: Machine
    args: Mapping[str, Flag | None]
    """Flags that are set already: the run file's, and eyas' own on a CPU."""
    env: Mapping[str, str]
    """Variables that are set already."""
    tp: int
    tune: Tune
    text_config: Mapping[str, Any]
    served: Mapping[str, Any]
    """What the default server says of its settings; names with underscores."""
    nccl: Sequence[Mapping[str, str]] = ()
    """NCCL settings that won the stand-alone all-reduce."""

    @property
    def most(self) -> int:
        """Requests under way at once, at most."""
        return max(self.tune.concurrencies)


def facts(
    machine: Machine,
    config: Server,
    tune: Tune,
    text_config: Mapping[str, Any],
    served: Mapping[str, Any],
    nccl: Sequence[Mapping[str, str]] = (),
) -> Facts:
    """The facts of a run file on a machine."""
    args, env = all_flags(config, None, {}), {**os.environ, **config.env}
    return Facts(machine, args, env, config.tp, tune, text_config, served, nccl)


Rule = Callable[[Facts], Sequence[Setting] | str]


def _attention(known: Facts) -> Sequence[Setting] | str:
    capability, packages = known.machine.capability, known.machine.packages
    mla = known.text_config.get("kv_lora_rank") is not None
    fits = {
        "fa3": (8, 0) <= capability < (10, 0),
        "flashinfer": "flashinfer" in packages,
        "triton": not mla or capability < (10, 0),
        "trtllm_mla" if mla else "trtllm_mha": capability >= (10, 0) and "flashinfer" in packages,
        "flashmla": mla and (9, 0) <= capability < (10, 0),
    }
    offered = known.machine.flags["attention-backend"]
    now = known.served.get("attention_backend")
    chosen = [name for name, fit in fits.items() if fit and name != now and (not offered or name in offered)]
    return [Setting({"attention-backend": name}) for name in chosen] or f"only {now or 'the default one'} runs here"


def _graphs(name: str) -> Rule:
    def rule(known: Facts) -> Sequence[Setting] | str:
        if known.args.get("disable-cuda-graph"):
            return "disable-cuda-graph is set"
        config = known.served.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, dict) else None
        said = [known.served.get(name.replace("-", "_")), decode.get("max_bs") if isinstance(decode, dict) else None]
        now = max(one if isinstance(one, int) else 0 for one in said)
        if known.most <= max(now, 8):
            captured = f"graphs reach {now} requests already" if now else "so few requests have a graph anyway"
            return f"{captured}, the goal asks for {known.most}"
        return [Setting({name: known.most})]

    return rule


def _overlap(known: Facts) -> Sequence[Setting] | str:
    if known.served.get("disable_overlap_schedule"):
        return "the overlap schedule is off here by default"
    return [Setting({"disable-overlap-schedule": True})]


def _all_reduce(known: Facts) -> Sequence[Setting] | str:
    if known.tp == 1:
        return "one GPU has nothing to reduce"
    # NCCL reduces a decode step's small messages only where the custom kernel does not.
    off = Setting({"disable-custom-all-reduce": True})
    custom = not known.args.get("disable-custom-all-reduce") and not known.served.get("disable_custom_all_reduce")
    nccl = [(off if custom else DEFAULT) | Setting({}, env) for env in known.nccl]
    return [*nccl, *([off] if custom else [])] or "NCCL's own choice won the stand-alone all-reduce"


def _mixed(known: Facts) -> Sequence[Setting] | str:
    if known.most == 1:
        return "one request at a time has no prefill to mix its decoding with"
    return [Setting({"enable-mixed-chunk": True})]


def _compile(known: Facts) -> Sequence[Setting] | str:
    return [Setting({"enable-torch-compile": True, "torch-compile-max-bs": known.most})]


def _kv(known: Facts) -> Sequence[Setting] | str:
    if not known.tune.lossy:
        return "changes answers: set tune.lossy=true to try it"
    if known.machine.capability < (8, 9):
        return "this card has no fp8"
    return [Setting({"kv-cache-dtype": "fp8_e4m3"})]


GPU_ONLY = "nothing of it runs on a CPU"
RULES: tuple[tuple[str, Rule, bool, bool], ...] = (
    ("attention-backend", _attention, False, True),
    ("cuda-graph-max-bs-decode", _graphs("cuda-graph-max-bs-decode"), False, True),
    ("cuda-graph-max-bs", _graphs("cuda-graph-max-bs"), False, True),
    ("disable-custom-all-reduce", _all_reduce, False, True),
    (
        "num-continuous-decode-steps",
        lambda _: [Setting({"num-continuous-decode-steps": steps}) for steps in (4, 8)],
        True,
        False,
    ),
    ("disable-overlap-schedule", _overlap, False, False),
    ("enable-mixed-chunk", _mixed, False, False),
    ("kv-cache-dtype", _kv, False, True),
    ("enable-torch-compile", _compile, False, True),
)
"""Flag, its rule, whether its settings are ordered, whether it needs a GPU; the most promising first."""
FLAGS = tuple(name for name, *_ in RULES)
SAID = (*(name.replace("-", "_") for name in FLAGS), "cuda_graph_config")
"""What the rules look at in what a server says of its settings."""
THREADS, ALL_REDUCE = "OMP_NUM_THREADS", "disable-custom-all-reduce"
IMPLIED = {
    "attention-backend": ("decode-attention-backend", "prefill-attention-backend"),
    "cuda-graph-max-bs-decode": ("cuda-graph-bs-decode", "cuda-graph-config"),
    "cuda-graph-max-bs": ("cuda-graph-bs",),
    "enable-torch-compile": ("torch-compile-max-bs",),
}
"""Flags that, once set, decide about another."""
RENAMED = {"cuda-graph-max-bs": "cuda-graph-max-bs-decode"}
"""Old names of flags, which count only where the new one is not known."""


def space(known: Facts) -> tuple[list[Factor], list[LeftOut]]:
    """What to try, the most promising first, and what not. Raises UserError: tune.options names what there is not."""
    factors: list[Factor] = []
    left: list[LeftOut] = []
    for name, rule, ordered, gpu in RULES:
        if name in RENAMED and (RENAMED[name] in known.machine.flags or name not in known.machine.flags):
            continue
        found = _general(name, gpu, known) or rule(known)
        if isinstance(found, str):
            left.append(LeftOut(name, found))
        else:
            factors.append(Factor(name, tuple(found), ordered))
    threads = _threads(known)
    if isinstance(threads, str):
        left.append(LeftOut(THREADS, threads))
    else:
        factors.append(Factor(THREADS, tuple(threads)))
    if wanted := known.tune.options:
        names = {factor.name for factor in factors} | {one.name for one in left}
        if unknown := [name for name in wanted if name not in names]:
            raise UserError(f"tune.options: no option {unknown[0]}; there are {', '.join(sorted(names))}")
        left += [LeftOut(one.name, "not among tune.options") for one in factors if one.name not in wanted]
        factors = [factor for factor in factors if factor.name in wanted]
    return factors, left


def _general(name: str, gpu: bool, known: Facts) -> str | None:
    """Why a flag is not tried, whatever its rule says."""
    for one in (name, *IMPLIED.get(name, ())):
        # All-reduce has a variable part too: a fixed flag leaves NCCL to try.
        if known.args.get(one) not in (None, False) and name != ALL_REDUCE:
            who = "eyas sets it on a CPU" if known.machine.device == "cpu" else "server.args sets it"
            return who if one == name else f"{one} is set, which decides it"
    if gpu and known.machine.device != "cuda":
        return GPU_ONLY if known.machine.device == "cpu" else "there is no CUDA device"
    if name not in known.machine.flags:
        return f"SGLang {known.machine.version} does not know it"
    if name in known.machine.unread:
        return f"SGLang {known.machine.version} takes it, but nothing in it reads it"
    return None


def _threads(known: Facts) -> Sequence[Setting] | str:
    if known.machine.device != "cpu":
        return "the GPU computes"
    if THREADS in known.env:
        return "the environment sets it"
    cores = usable_cores()
    return [Setting({}, {THREADS: str(cores // 2)})] if cores > 1 else "there is one core"


PROTOCOLS, ALGORITHMS, CHANNELS = ("LL", "LL128", "Simple"), ("Ring", "Tree"), (2, 8, 32)
NCCL = "NCCL_*"


def nccl_candidates(known: Facts) -> tuple[list[dict[str, str]], list[LeftOut]]:
    """NCCL settings, one variable at a time, for the stand-alone all-reduce; and what is left out of it."""
    if known.machine.device != "cuda":
        return [], [LeftOut(NCCL, "no GPU: nothing is reduced through NCCL")]
    if known.tp == 1:
        return [], [LeftOut(NCCL, "one GPU has nothing to reduce")]
    if known.tune.options and ALL_REDUCE not in known.tune.options:
        return [], [LeftOut(NCCL, "not among tune.options")]
    nvlink = known.machine.links == "nvlink"
    choices: list[dict[str, str]] = [{"NCCL_PROTO": name} for name in PROTOCOLS]
    choices += [{"NCCL_ALGO": name} for name in ALGORITHMS]
    choices += [{"NCCL_MIN_NCHANNELS": str(n), "NCCL_MAX_NCHANNELS": str(n)} for n in CHANNELS]
    choices += [{"NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "1"}]
    found, left = [], list[LeftOut]()
    for env in choices:
        name = Setting({}, env).name
        if fixed := [variable for variable in env if variable in known.env]:
            left.append(LeftOut(name, f"the environment sets {fixed[0]}"))
        elif env.get("NCCL_PROTO") == "LL128" and not nvlink:
            left.append(LeftOut(name, "only NVLink is known to keep its 128-byte stores whole"))
        elif nvlink and any(variable.startswith("NCCL_P2P") for variable in env):
            left.append(LeftOut(name, "the GPUs reach each other over NVLink anyway"))
        else:
            found.append(env)
    return found, left


def grid_loads(factors: Sequence[Factor]) -> int:
    """Server loads that trying every combination would take."""
    return math.prod(1 + len(factor.settings) for factor in factors)
