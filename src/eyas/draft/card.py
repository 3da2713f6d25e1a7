"""The card step: the exported draft with a README that says what it does, the folder that is given to others."""

import os
import shutil
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json, write_atomic
from eyas.progress import Progress
from eyas.spec import StepSpec

README = "README.md"
STEP_FILES = frozenset({README, "result.json", "outputs.json"})


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. The draft's files are hard links to the export step's, where the file system has them."""
    verdict = read_json(spec.inputs["verdict"] / "verdict.json")
    export = spec.inputs["export"]
    for path in sorted(export.iterdir()):
        if path.is_file() and path.name not in STEP_FILES:
            _link(path, out / path.name)
    text = (export / README).read_text(encoding="utf-8")
    write_atomic(out / README, text + figures(verdict))
    return {"files": sorted(path.name for path in out.iterdir())}


def _link(path: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
    if to.stat().st_size != path.stat().st_size:
        raise UserError(f"{to}: is not the {path.name} that was exported; is the disk full?")


def figures(verdict: dict[str, Any]) -> str:
    """The part of the model card that the verdict fills: what was decided, why, and the exact command."""
    decided = {"yes": "deploy", "up_to": "deploy for a limited number of requests at once", "no": "do not deploy"}
    lines = ["", "## Measured", "", f"Verdict: {decided[verdict['deploy']['verdict']]}.", ""]
    lines += [f"- {reason}" for reason in verdict["reasons"]]
    if launch := verdict.get("launch"):
        lines += ["", "Served as it was measured by", "", f"    {launch}"]
    return "\n".join(lines) + "\n"
