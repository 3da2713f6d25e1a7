"""The plugin as a folder for another interpreter's PYTHONPATH: nothing has to be installed there.

Holds the plugin's modules under their own names and a `.dist-info` whose entry point SGLang's plugin framework finds.
It stands before an eyas that may be installed there, whose version could be another.
"""

import shutil
from pathlib import Path

import eyas

PACKAGE = Path(eyas.__file__).parent
MODULES = ("__init__.py", "engines/__init__.py", "engines/sglang/__init__.py")
PLUGIN = "engines/sglang/plugin"
NAME = "eyas"
"""Of the entry point; SGLANG_PLUGINS, where it is set, has to list it."""


def ship(folder: Path) -> Path:
    """Write the plugin under `folder`, replacing what was there; returns the folder for PYTHONPATH. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    package, info = folder / "eyas", folder / f"eyas-{eyas.__version__}.dist-info"
    for module in MODULES:
        (package / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / module, package / module)
    shutil.copytree(PACKAGE / PLUGIN, package / PLUGIN, ignore=shutil.ignore_patterns("__pycache__"))
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eyas\nVersion: {eyas.__version__}\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = eyas.engines.sglang.plugin:register\n")
    return folder
