"""One `eyas run`, from the lock to the report."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import write_json
from eyas.plan.digests import Plan
from eyas.run import expected, lock, retention
from eyas.run.executor import FINISHED, STOPPED, Executor
from eyas.run.faults import IN_A_RUN, plain_errors
from eyas.run.folder import RunFolder
from eyas.run.journal import Journal
from eyas.run.machine import machine
from eyas.run.timeline import timeline
from eyas.run.view import View, Watcher

OUTCOMES = {FINISHED: "finished", STOPPED: "stopped"}


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    seconds: float
    views: list[View]
    notes: list[str]
    """What could not be done afterwards, such as the report without matplotlib."""


def run(folder: Path, plan: Plan, resolved: dict[str, Any], watcher: Watcher, hold: float = 0.0) -> Outcome:
    """Make or continue the run folder: run the plan, then write verdict, timeline, draft link and report.

    `resolved` is the run file with every default, `hold` the seconds for which a service outlives a failed step. Raises
    UserError: folder owned by another runner, disk full or read-only, journal damaged.
    """
    started = time.time()
    if folder.is_file():
        raise UserError(f"{folder} is a file, not a run folder: choose another folder with --runs DIR")
    with plain_errors(folder, IN_A_RUN):
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder) as holding:
            run_folder = RunFolder(folder)
            journal = Journal(run_folder.journal, os.getpid(), socket.gethostname())
            outcome = "failed"
            try:
                run_folder.begin(plan, resolved)
                executor = Executor(run_folder, plan, journal, watcher, expected.here(plan, machine(resolved)), hold)
                code = executor.run(holding)
                outcome = OUTCOMES.get(code, "failed")
                views = list(executor.views.values())
                # The next runner waits for the folder, and writes all that is written at the end.
                trace = timeline(folder.name, plan, views, started, executor.loads, executor.outlook.first or {})
                notes = [] if executor.handed_over else _conclude(run_folder, plan, views, trace, resolved)
            finally:
                journal.end(outcome)
    return Outcome(code, time.time() - started, views, [*notes, *retention.expire(folder.parent)])


def _conclude(
    run: RunFolder, plan: Plan, views: list[View], trace: dict[str, Any], resolved: dict[str, Any]
) -> list[str]:
    results = {view.name: view.folder.result() for view in views if view.state == "finished"}
    versions = run.versions(results)
    write_json(run.path / "versions.json", versions)
    seconds = {view.name: round(view.seconds, 3) for view in views if view.seconds is not None}
    verdict = results.get("verdict") or {"reasons": [f"{v.name} failed: {v.error}" for v in views if v.error]}
    write_json(run.path / "verdict.json", {**verdict, "seconds": seconds, "versions": versions, "seed": plan.seed})
    write_json(run.path / "timeline.json", trace)
    if all(view.state == "finished" for view in views):
        for view, planned in zip(views, plan.steps, strict=True):
            if planned.step.product:
                run.link_draft(view.folder.out)
        run.prune(plan)
    notes = report(run.path, strict=False)
    if all(view.state == "finished" for view in views) and (done := retention.after_success(run, resolved)):
        notes.append(done)
    return notes


def report(folder: Path, strict: bool = True) -> list[str]:
    """Build report.html; returns what stood in the way, which raises when `strict`."""
    try:
        with plain_errors(folder):
            from eyas.report import build

            build(folder)
    except Exception as error:
        if strict:
            raise
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return [f"no report.html ({why}); build it later with `eyas report {folder}`"]
    return []
