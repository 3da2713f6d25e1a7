"""The capture plugin for a server that the user starts: `eyas plugin DIR`."""

import shlex
from pathlib import Path

from eyas import config
from eyas.config import Server
from eyas.engines.layers import resolve
from eyas.engines.sglang import ship
from eyas.engines.sglang.plugin.protocol import VARIABLE, Orders
from eyas.engines.sglang.server import HOLD_SECONDS
from eyas.errors import UserError
from eyas.files import plain_os_errors


def status_of(root: Path) -> Path:
    """Where the plugin of a server that eyas did not launch says that it is there."""
    return root / "status"


def install(folder: Path, layers: str, convention: str, captures: Path | None) -> str:
    """Write plugin, orders and capture root; returns the lines for launch script and run file.

    Raises UserError: layers that are none, a folder that holds something else.
    """
    folder = folder.expanduser().absolute()
    root = (captures or folder / "captures").expanduser().absolute()
    wanted = layer_ids(layers, convention)
    with plain_os_errors(folder):
        if folder.exists() and any(folder.iterdir()) and not (folder / "orders.json").is_file():
            raise UserError(f"{folder}: holds something else; choose an empty folder")
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        status_of(root).mkdir(exist_ok=True)
        for old in status_of(root).glob("rank*.json"):
            old.unlink()
        ship.ship(folder / "plugin")
        staging = Server().staging_mib * 2**20
        Orders(root, status_of(root), wanted, staging, HOLD_SECONDS).write(folder / "orders.json")
    said = "" if wanted is None else f"capture: {{layers: [{layers}], convention: {convention}}}\n"
    return f"""\
# In the script that starts the server, before SGLang; if it sets SGLANG_PLUGINS, add `{ship.NAME}` there:
export PYTHONPATH={shlex.quote(str(folder / "plugin"))}${{PYTHONPATH:+:$PYTHONPATH}}
export {VARIABLE}={shlex.quote(str(folder / "orders.json"))}

# In the run file (the server's own address and port):
engine: {{kind: sglang}}
server: {{url: "http://127.0.0.1:30000", captures: {config_string(root)}}}
{said}"""


def layer_ids(layers: str, convention: str) -> tuple[int, int, int] | None:
    """The hidden_states indices that the command line means; None: the default ones. Raises UserError."""
    if layers == "default":
        return None
    try:
        ids = [int(one) for one in layers.split(",")]
    except ValueError as error:
        raise UserError(f"--layers {layers}: write default, or three numbers as 2,15,27") from error
    section = {"layers": ids, "convention": convention}
    checked = config.parse({"name": "x", "target": {"model": "x"}, "capture": section}, "--layers").capture
    # How many layers the target has is checked when the run asks the server.
    return resolve(checked.layers, checked.convention, 10**6)


def config_string(path: Path) -> str:
    """A path as YAML."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
