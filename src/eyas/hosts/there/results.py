"""Results of a run on a host, to be taken home."""

from __future__ import annotations

import base64
from typing import Any

from eyas.hosts.there.base import answer, file_digest, read_json, root_of

RESULTS = ("run.yaml", "plan.json", "versions.json", "verdict.json", "report.html", "timeline.json")
CHUNK = 1 << 18


def results(request: dict[str, Any]) -> dict[str, Any]:
    """The files of a run that are worth taking home, with their digests; never hidden states."""
    run = root_of(request) / "runs" / request["name"]
    found = [run / name for name in RESULTS]
    found += [
        run / "draft" / path.relative_to((run / "draft").resolve()) for path in (run / "draft").resolve().rglob("*")
    ]
    for step in read_json(run / "plan.json").get("steps", []):
        there = run / "steps" / step["name"] / step["digest"]
        found += [there / "progress.jsonl", there / "out" / "result.json"]
    return {
        "folder": str(run),
        "files": [
            [path.relative_to(run).as_posix(), path.stat().st_size, file_digest(path)]
            for path in found
            if path.is_file()
        ],
    }


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Files of a run, each from an offset on."""
    run = root_of(request) / "runs" / request["name"]
    for name, offset in request["files"]:
        with (run / name).open("rb") as file:
            file.seek(offset)
            while piece := file.read(CHUNK):
                answer({"file": name, "data": base64.b64encode(piece).decode()})
    return {}
