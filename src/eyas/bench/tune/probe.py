"""Run by the server's interpreter: what its machine and its SGLang are, as one line of JSON on stdout.

`probe.py DEVICE FLAG...` needs nothing of eyas, and torch only where DEVICE is not `cpu`. It never imports SGLang.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

BEGIN = "eyas-probe "


def main() -> None:
    """Print the facts: version, packages, which of the flags SGLang's own code reads, and the GPUs."""
    device, *flags = sys.argv[1:]
    found: dict[str, Any] = {
        "version": version(),
        "packages": [name for name in ("flashinfer",) if importlib.util.find_spec(name)],
        "unread": unread(flags),
        "gpus": [],
        "topology": "",
    }
    if device != "cpu":
        import torch

        count = torch.cuda.device_count()
        found["gpus"] = [
            {"name": torch.cuda.get_device_name(i), "capability": list(torch.cuda.get_device_capability(i))}
            for i in range(count)
        ]
        found["topology"] = topology()
    print(BEGIN + json.dumps(found))


def version() -> str:
    """Of the installed SGLang; "unknown" where it is none that was installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def unread(flags: list[str]) -> list[str]:
    """Flags that nothing in the installed SGLang reads: their names stand behind a dot nowhere, but for
    `ServerArgs.name`, which is how a default is declared."""
    spec = importlib.util.find_spec("sglang")
    folders = list(spec.submodule_search_locations or []) if spec else []
    left = {flag: re.compile(rf"(?<!ServerArgs)\.{flag.replace('-', '_')}\b") for flag in flags}
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        left = {flag: name for flag, name in left.items() if not name.search(text)}
        if not left:
            break
    return sorted(left) if folders else []


def topology() -> str:
    """What `nvidia-smi topo -m` prints; empty without it."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
