"""What the machine and the installed SGLang offer: read once, before anything is tried."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.bench.tune import probe
from eyas.config import Server
from eyas.engines.sglang.command import environment
from eyas.errors import UserError

PROBE_SECONDS = 300.0


@dataclass(frozen=True)
class Machine:
    """As the server will see it."""

    device: Literal["cuda", "cpu", "other"]
    version: str
    """Of SGLang."""
    flags: Mapping[str, tuple[str, ...]]
    """Flags that this SGLang takes, without dashes; with the values to choose from, where it names them."""
    unread: frozenset[str] = frozenset()
    """Flags that it takes and then ignores."""
    packages: frozenset[str] = frozenset()
    gpus: int = 0
    """Visible ones."""
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    """The lowest of all."""
    links: Literal["nvlink", "pcie", "mixed", "unknown"] = "unknown"
    """How the GPUs reach each other."""

    def to_json(self) -> dict[str, Any]:
        """For tune.json; without the flags."""
        return {
            "device": self.device, "sglang": self.version, "gpus": self.gpus, "gpu": self.gpu,
            "capability": list(self.capability), "links": self.links,
        }  # fmt: skip


def read(config: Server, flags: Sequence[str]) -> Machine:
    """Ask the server's interpreter, in the server's environment; `flags`: which ones may turn out to be `unread`.

    Raises UserError: it cannot be run, or has no SGLang.
    """
    on_cpu = config.args.get("device") == "cpu"
    env = {**environment(config, on_cpu, "", None), "COLUMNS": "200", "NO_COLOR": "1"}
    said = _run(config.python, [probe.__file__, "cpu" if on_cpu else "cuda", *flags], env)
    lines = [line for line in said.splitlines() if line.startswith(probe.BEGIN)]
    if not lines:
        raise UserError(f"server.python: {config.python} cannot say what machine this is: {_last(said)}")
    facts = json.loads(lines[-1].removeprefix(probe.BEGIN))
    helped = _run(config.python, ["-m", "sglang.launch_server", "--help"], env)
    known = parse_help(helped)
    if "model-path" not in known:
        raise UserError(f"server.python: {config.python} has no SGLang that names its flags: {_last(helped)}")
    gpus = facts["gpus"]
    return Machine(
        device="cpu" if on_cpu else "cuda" if gpus else "other",
        version=facts["version"],
        flags=known,
        unread=frozenset(facts["unread"]),
        packages=frozenset(facts["packages"]),
        gpus=len(gpus),
        gpu=gpus[0]["name"] if gpus else "",
        capability=min(((one["capability"][0], one["capability"][1]) for one in gpus), default=(0, 0)),
        links=links(facts["topology"]),
    )


def parse_help(text: str) -> dict[str, tuple[str, ...]]:
    """The flags in argparse's help, with their choices."""
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if re.match(r"  -", line):
            head = re.split(r"(?<=\S)  +", line.strip())[0]
            choices = re.search(r"\{([^}]*)\}", head)
            for name in re.findall(r"(?<!\S)--([a-z][\w-]*)", head):
                found[name] = tuple(choices[1].split(",")) if choices else ()
    return found


def links(topology: str) -> Literal["nvlink", "pcie", "mixed", "unknown"]:
    """What `nvidia-smi topo -m` says of the links between GPUs."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]
    cells = {cell.startswith("NV") for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    if not cells:
        return "unknown"
    return "mixed" if len(cells) == 2 else "nvlink" if True in cells else "pcie"


def _run(python: str, args: Sequence[str], env: Mapping[str, str]) -> str:
    """Stdout, and stderr where that is all there is. Raises UserError."""
    found = shutil.which(python, path=env.get("PATH", os.defpath))
    if found is None:
        raise UserError(f"server.python: {python} is not there or cannot be run: name the interpreter that has SGLang")
    try:
        done = subprocess.run([found, *args], env=dict(env), capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"server.python: {python} does not answer within {PROBE_SECONDS:.0f} s") from error
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def _last(text: str) -> str:
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "it says nothing")
