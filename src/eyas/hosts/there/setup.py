"""Makes an environment on a host: `setup.py FOLDER LOCK [WHEELS]`. Run as a job; whole once ready.json is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path


def main(folder: Path, lock: Path, wheels: str | None) -> None:
    """Make it with uv where there is one, else with pip; from a folder of wheels alone, if one is named."""
    shutil.rmtree(str(folder), ignore_errors=True)
    python, uv = folder / "bin" / "python", shutil.which("uv")
    offline = ["--no-index", "--find-links", str(Path(wheels).expanduser())] if wheels else []
    if uv:
        run(uv, "venv", "--python", sys.executable, str(folder))
        run(uv, "pip", "install", "--python", str(python), *offline, "-r", str(lock))
        run(uv, "pip", "check", "--python", str(python))
    else:
        run(sys.executable, "-m", "venv", str(folder))
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        run(*pip, "install", *offline, "-r", str(lock))
        run(*pip, "check")
    (folder / "ready.json").write_text(json.dumps({"lock": lock.read_text()}))


def run(*command: str) -> None:
    """Run a program whose output goes to the job's log; its failure is ours."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
