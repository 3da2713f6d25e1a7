"""The command line and the environment of a server."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eyas.config import Flag, Server
from eyas.engines.sglang import ship
from eyas.engines.sglang.kept import MARK
from eyas.engines.sglang.plugin.protocol import VARIABLE
from eyas.errors import UserError
from eyas.files import read_json

CPU_FLAGS: dict[str, Flag] = {
    # This odd trio is right: torch_native alone prefills MLA models wrongly and serves no draft.
    "attention-backend": "torch_native",
    "prefill-attention-backend": "intel_amx",
    "decode-attention-backend": "intel_amx",
    "disable-cuda-graph": True,
    "mem-fraction-static": 0.3,
    "max-total-tokens": 20000,
    "sleep-on-idle": True,
    "max-running-requests": 64,
}


PORT = 30000
"""Of a command to be typed, where the run file names none: SGLang's own default."""


@dataclass(frozen=True)
class Draft:
    """An exported draft that the server speculates with."""

    folder: Path
    tokens: int


def tuned(config: Server, inputs: Mapping[str, Path]) -> Server:
    """The run file's server with what the tune step found, for a step or service that needs that step."""
    if "tune" not in inputs:
        return config
    winner = read_json(inputs["tune"] / "result.json")["winner"]
    return config.model_copy(
        update={"args": {**config.args, **winner["flags"]}, "env": {**config.env, **winner["env"]}}
    )


def command(config: Server, model: Path, dtype: str, port: int, args: Mapping[str, Flag | None]) -> list[str]:
    """The command line of a server. `args` are all flags that have no field of their own."""
    line = [config.python, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    line += ["--tp", str(config.tp)] + ([] if dtype == "auto" else ["--dtype", dtype])
    own = {"host": "127.0.0.1", "trust-remote-code": config.trust_remote_code}
    for name, value in {**own, **args}.items():
        if value is None or value is False:
            continue
        values = [] if value is True else [str(one) for one in value] if isinstance(value, list) else [str(value)]
        # A value that begins with a dash and is no number would be read as a flag.
        if len(values) == 1 and values[0].startswith("-"):
            line.append(f"--{name}={values[0]}")
        else:
            line += [f"--{name}", *values]
    return line


def shell(config: Server, model: Path, dtype: str, draft: Draft | None = None) -> str:
    """The command of a server for a shell, with the run file's environment."""
    line = command(config, model, dtype, config.port or PORT, flags(config, draft, {}))
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in config.env.items()), shlex.join(line)])


def flags(config: Server, draft: Draft | None, extra: Mapping[str, Flag]) -> dict[str, Flag | None]:
    """The run file's flags with what a CPU and a draft need. Raises UserError."""
    args: dict[str, Flag | None] = {**config.args, **extra}
    if args.get("api-key"):
        raise UserError(
            "server.args api-key: eyas asks without one, and the server listens on this machine only: leave it out"
        )
    on_cpu = args.get("device") == "cpu"
    if on_cpu:
        args = {**CPU_FLAGS, **args}
    if draft:
        args |= {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": str(draft.folder),
            "speculative-num-steps": draft.tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": draft.tokens + 1,
        }
        if on_cpu:
            args["speculative-draft-attention-backend"] = "intel_amx"
    return args


def environment(config: Server, on_cpu: bool, mark: str, folder: Path | None) -> dict[str, str]:
    """The environment of a server: this process's, the run file's, and what plugin and CPU need.

    `folder` holds plugin/ and orders.json; None: no plugin.
    """
    env = {**os.environ, **config.env, MARK: mark}
    path = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    env.pop(VARIABLE, None)
    if on_cpu:
        path.insert(0, str(Path(__file__).parent / "cpu"))
        env.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        # Threads that spin at barriers make a server a hundred times slower on cores that do other work too.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if folder:
        path.insert(0, str((folder / "plugin").absolute()))
        env[VARIABLE] = str((folder / "orders.json").absolute())
        if listed := env.get("SGLANG_PLUGINS"):
            names = [name.strip() for name in listed.split(",") if name.strip()]
            env["SGLANG_PLUGINS"] = ",".join([*names, *([] if ship.NAME in names else [ship.NAME])])
    if path:
        env["PYTHONPATH"] = os.pathsep.join(path)
    return env
