"""`eyas host probe`: what a host has, as of now, and what that means for a run."""

import time
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.files import read_json
from eyas.hosts import record
from eyas.hosts.ssh import Link
from eyas.plan.graph import BUILTIN_PROMPTS
from eyas.room import size, token_bytes
from eyas.ui.text import duration

PYTHON = (3, 11)
CONTROL = ("pydantic", "pyyaml", "rich", "typer", "xxhash")
TRAIN = ("torch", "transformers", "safetensors", "numpy", "jinja2")
SKEW_SECONDS = 5.0


def probe(name: str, interpreters: list[str], paths: list[str]) -> dict[str, Any]:
    """Look at a host and keep what was found. Raises UserError when it cannot be reached."""
    link = Link(record.load(name))
    link.first_call("shelf.hello")
    sent = time.time()
    found = link.first_call("probe.probe", interpreters=interpreters, paths=paths)
    came = time.time()
    # The clock there was read at some moment in between: early, since all else takes longer.
    clock = found.pop("clock")
    skew = 0.0 if sent <= clock <= came else clock - (sent if clock < sent else came)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(came))
    found = {"host": name, "time": when, "skew": round(skew, 3), **found}
    record.save_probe(name, found)
    return found


def as_text(found: dict[str, Any]) -> str:
    """A probe for people."""
    gpus, root, memory = found["gpus"], found["root"], found["memory"]
    kinds = {gpu["name"]: gpu for gpu in gpus}
    where = f"{found['host']} at {found['time']}: {found['hostname']}, {found['system']}"
    lines = [f"{where}, clock off {found['skew']:.1f} s"]
    for kind, gpu in kinds.items():
        count = sum(one["name"] == kind for one in gpus)
        lines.append(f"{count} x {kind}, {gpu['mib']} MiB, driver {gpu['driver']}, CUDA {found['cuda']}")
    if not gpus:
        lines.append("no GPU")
    for index, gpu in enumerate(gpus):
        lines += [f"GPU {index} is held by process {one['pid']} of {one['user']}" for one in gpu["held_by"]]
    lines.append(f"{found['cores']} cores of {found['processor']}, {len(found['numa'])} NUMA nodes")
    shm = size(found["shm"]["free"])
    lines.append(f"memory {size(memory['total'])}, {size(memory['free'])} free; /dev/shm {shm} free")
    lines.append(
        f"root {root['path']} on {root['kind']}: {size(root['free'])} free, writes {root['write_mb']} MB/s, "
        f"reads {root['read_mb']} MB/s"
    )
    for name, one in found["interpreters"].items():
        packages = ", ".join(f"{package} {version}" for package, version in one.get("packages", {}).items())
        lines.append(f"{name}: " + (f"Python {one['python']}, {packages}" if one else "no such interpreter"))
    for name, one in found["paths"].items():
        lines.append(f"{name}: {size(one['bytes'])} on {one['kind']}" if one else f"{name}: is not there")
    for one in found["servers"]:
        lines.append(f"a server runs: process {one['pid']} of {one['user']}, {one['model']}, port {one['port']}")
    return "\n".join(lines)


def fit(config: RunConfig, host: str | None, recorded: Path | None) -> list[str]:
    """What a plan says of a host, from its newest probe or a recorded one. Raises UserError: there is none."""
    settings = record.load(host) if host is not None else None
    if recorded is not None and not recorded.is_file():
        raise UserError(f"--probe {recorded}: no such file; recipes/probes has one, and `eyas host probe` makes one")
    found = read_json(recorded) if recorded is not None else record.last_probe(str(host))
    if not isinstance(found, dict) or not found.get("root"):
        raise UserError(f"{host or recorded}: was never probed: eyas host probe {host or 'NAME'}")
    lacks = missing(config, found, settings.python if settings else None)
    gpus = found["gpus"]
    kind = f"{len(gpus)} x {gpus[0]['name']}" if gpus else "no GPU"
    lines = [f"Host {found['host']}, probed {found['time']}: {kind}, {len(found['numa'])} NUMA nodes"]
    if note := found.get("note"):
        lines.append(f"  {note}")
    lines.append("  the times above were learned on this machine, not there")
    if (model := found["paths"].get(config.target.model)) and (read := found["root"].get("read_mb")):
        seconds = model["bytes"] / 1e6 / read
        lines.append(f"  weights {size(model['bytes'])}, read in {duration(seconds)} at {read:.0f} MB/s of root's disk")
    if (needed := states_bytes(config, found)) is not None:
        lines.append(f"  states at most {size(needed)}, {size(found['root']['free'])} free in {found['root']['path']}")
    return lines + [f"  missing: {one}" for one in lacks] if lacks else [*lines, "  nothing that was probed is missing"]


def missing(config: RunConfig, found: dict[str, Any], python: str | None) -> list[str]:
    """What a host lacks for a run, by its probe, and how to get it; empty when nothing is known to be missing.

    `python` is the interpreter of the runner, by host.python; None: an environment is made there.
    """
    lacks = [*_runner(found, python), *_disk(config, found)]
    if config.engine.kind == "sglang" and config.server.url is None:
        lacks += _server(config, found)
    if abs(found["skew"]) > SKEW_SECONDS:
        lacks.append(f"its clock is {found['skew']:+.0f} s off ours: set it (timedatectl set-ntp true)")
    return lacks


def _runner(found: dict[str, Any], python: str | None) -> list[str]:
    if python is None:
        return []
    one = found["interpreters"].get(python)
    if not one:
        return [f"host.python {python} was not probed or is not there: eyas host probe {found['host']}"]
    version = tuple(int(part) for part in one["python"].split(".")[:2])
    if version < PYTHON:
        return [f"{python} is Python {one['python']}, 3.11 is needed: name another one by --python"]
    absent = [name for name in (*CONTROL, *TRAIN) if name not in one["packages"]]
    if absent:
        names = ", ".join(absent)
        return [f"{python} lacks {names}: install them there, or leave host.python out, and eyas makes its own"]
    return []


def _server(config: RunConfig, found: dict[str, Any]) -> list[str]:
    lacks, python, model = [], config.server.python, config.target.model
    if python not in found["interpreters"]:
        lacks.append(
            f"server.python {python} was not probed: eyas host probe {found['host']} --interpreter {python} "
            f"--path {model}"
        )
    elif "sglang" not in found["interpreters"][python].get("packages", {}):
        lacks.append(f"server.python {python} has no sglang: name the interpreter that has it")
    gpus = found["gpus"]
    if config.engine.device != "cpu" and len(gpus) < config.server.tp:
        lacks.append(f"server.tp is {config.server.tp}, the host has {len(gpus)} GPUs")
    for index, gpu in enumerate(gpus[: config.server.tp]):
        for one in gpu["held_by"]:
            lacks.append(f"GPU {index} is held by process {one['pid']} of {one['user']}: wait for it, or ask")
    path = found["paths"].get(model)
    if model.startswith(("/", "~")) and path == {}:
        lacks.append(f"target.model {model} is not there")
    elif path and gpus:
        share = config.server.args.get("mem-fraction-static")
        part = share if isinstance(share, float) else 0.9
        room = sum(gpu["mib"] for gpu in gpus[: config.server.tp]) * part * 2**20
        if path["bytes"] > room:
            lacks.append(
                f"the weights ({size(path['bytes'])}) do not fit into {config.server.tp} GPUs ({size(room)} at "
                f"mem-fraction-static {part})"
            )
    return lacks


def states_bytes(config: RunConfig, found: dict[str, Any]) -> int | None:
    """Most bytes that the training states take, answers all at their longest; None while that is unknown."""
    builtin = BUILTIN_PROMPTS if config.prompts.train == "builtin" else None
    prompts = config.prompts.train_limit or builtin
    hidden = found["paths"].get(config.target.model, {}).get("hidden_size")
    if prompts is None or hidden is None:
        return None
    return prompts * config.answers.max_new_tokens * token_bytes(hidden, "bfloat16")


def _disk(config: RunConfig, found: dict[str, Any]) -> list[str]:
    needed, root = states_bytes(config, found), found["root"]
    if needed is None or needed < root["free"]:
        return []
    return [
        f"the states may take {size(needed)}, {root['path']} has {size(root['free'])} free: lower prompts.train_limit"
    ]
