"""`eyas doctor`: about one minute against a server before hours are spent on it.

Whatever a serving engine is known to do wrong to captured states is provoked here, in small: chunk boundaries, odd
lengths, shared prefixes, many requests at once with plain ones in between, tensor-parallel ranks. Every capture runs
through the cheap proofs, and is compared with another of the same ids: what a request gives must not depend on what
runs beside it, on how it is cut into chunks, or on what came before. What does not fit into the time is reported as not
tried.
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.config import Capture, RunConfig
from eyas.engines import target as targets
from eyas.engines import weights
from eyas.engines.layers import resolve
from eyas.engines.sglang import client, server, service, twin
from eyas.engines.sglang import info as infos
from eyas.engines.sglang.checks import Check
from eyas.engines.sglang.client import ServerDied
from eyas.engines.sglang.examination import Examination
from eyas.engines.sglang.info import ServerInfo, require_capturable
from eyas.engines.sglang.plugin.protocol import status_file
from eyas.engines.sglang.server import Endpoint
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json
from eyas.progress import Progress
from eyas.spec import StepSpec

SECONDS = 60.0


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `server`. Raises UserError that names the first failed check and its remedy."""
    began = time.monotonic()
    target = targets.read(spec.inputs["target"])
    endpoints = server.endpoints(spec.services["server"])
    with client.leased():
        info = infos.read(endpoints[0].url)
        found = list(check(endpoints, info, target, spec.section(Capture), progress))
    twin.require(found, "eyas doctor")
    return {"checks": [one.to_json() for one in found], "seconds": round(time.monotonic() - began, 1)}


def examine(config: RunConfig, progress: Progress, *, prove: bool = True, serve: bool = True) -> dict[str, Any]:
    """What `eyas doctor` shows: `{"checks": […], "seconds"}`; the twin's with `prove`, a server's with `serve`.

    Takes the server that `server.url` names; else the twin comes first, and, if that is well, the server is launched
    for as long as it takes. Raises UserError: the target or the server cannot be used at all.
    """
    began = time.monotonic()
    target = targets.inspect(config.target.model, progress)
    found: list[Check] = []
    folder = Path(tempfile.mkdtemp(prefix="eyas-doctor-"))
    well = False
    try:
        if prove and config.server.twin and not (serve and config.server.url):
            layers = twin.custom_layers(config.capture, target)
            dtype = config.target.dtype
            proven = twin.prove(target, config.server, folder / "twin", progress, dtype=dtype, layers=layers)
            found += [replace(one, name=f"twin: {one.name}") for one in proven.checks]
        if serve and all(one.passed is not False for one in found):
            try:
                found += _examine_server(config, target, folder, progress)
            except ServerDied as error:
                found.append(Check("the server lives", False, str(error), f"look into its log, under {folder}"))
        well = all(one.passed is not False for one in found)
    finally:
        # Logs stay where something went wrong: what is said names them.
        shutil.rmtree(folder if well else folder / "twin" / "model", ignore_errors=True)
    return {"checks": [one.to_json() for one in found], "seconds": round(time.monotonic() - began, 1)}


def _examine_server(config: RunConfig, target: TargetInfo, folder: Path, progress: Progress) -> list[Check]:
    if config.server.url:
        endpoints = service.existing(config.server)
        return list(check(endpoints, infos.first(endpoints[0].url), target, config.capture, progress))
    layers = twin.custom_layers(config.capture, target)
    with server.started(
        config.server, target.folder, config.target.dtype, folder / "server", progress, layers=layers
    ) as running:
        endpoint = running.endpoint
        return list(check([endpoint], infos.read(endpoint.url), target, config.capture, progress))


def check(
    endpoints: Sequence[Endpoint],
    info: ServerInfo,
    target: TargetInfo,
    capture: Capture,
    progress: Progress,
    seconds: float = SECONDS,
) -> Iterator[Check]:
    """Examine every server, for about `seconds` each. Raises ServerDied, and UserError where a server refuses."""
    layers = resolve(capture.layers, capture.convention, target.num_layers)
    try:
        head = weights.head(target.folder)
    except UserError:
        head = None
    for endpoint in endpoints:
        where = f"{endpoint.url}: " if len(endpoints) > 1 else ""
        progress.milestone(f"examining {endpoint.url}")
        first = (plugin(endpoint, info, layers), flags(info, target))
        rest = Examination(endpoint, info, target, head, seconds).checks() if all(one.passed for one in first) else ()
        for found in itertools.chain(first, rest):
            yield replace(found, name=where + found.name)


def plugin(endpoint: Endpoint, info: ServerInfo, layers: tuple[int, int, int]) -> Check:
    """The plugin is loaded on every rank, writes to our root and collects the layers that are wanted."""
    name = "the plugin is loaded"
    start = "start the server as `eyas plugin` says, or let eyas launch it (leave out server.url)"
    if endpoint.root is None or endpoint.status is None:
        return Check(name, False, "this server was started without it", start)
    for rank in range(info.tp):
        path = status_file(endpoint.status, rank)
        if not path.is_file():
            return Check(name, False, f"rank {rank} has not said that it is there ({path})", start)
        said = read_json(path)
        if said.get("problem"):
            return Check(name, False, f"rank {rank}: {said['problem']}", "mend server.args")
        if said.get("layers") != list(layers):
            remedy = "start the server anew with the layers of this run file (`eyas plugin`)"
            return Check(name, False, f"it collects hidden_states {said.get('layers')}, not {list(layers)}", remedy)
        if Path(str(said.get("root"))).resolve() != endpoint.root.resolve():
            return Check(name, False, f"it writes to {said.get('root')}, not {endpoint.root}", "set server.captures")
    return Check(name, True, f"{info.tp} rank{'s' if info.tp > 1 else ''}, hidden_states {list(layers)}")


def flags(info: ServerInfo, target: TargetInfo) -> Check:
    """Nothing in the server's own settings stands in the way."""
    try:
        require_capturable(info, 1, target.vocab_size)
    except UserError as error:
        what, _, remedy = str(error).rpartition(": ")
        return Check("its flags allow capture", False, what, remedy)
    detail = f"SGLang {info.version}, {info.dtype}, context {info.context_length}, KV pool {info.kv_tokens} tokens"
    return Check("its flags allow capture", True, f"{detail}, chunks of {info.chunk or 'any size'}")
