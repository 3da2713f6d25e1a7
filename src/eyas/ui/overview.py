"""`eyas plan` and `eyas status`: a run before and while it goes on."""

import time
from pathlib import Path
from typing import Any

from eyas.plan import loads
from eyas.plan.changes import why
from eyas.plan.digests import Plan
from eyas.run import lock, outputs, process
from eyas.run.folder import RunFolder, StepFolder
from eyas.run.journal import expected
from eyas.run.protocol import printable
from eyas.ui.text import amount, duration


def planned(folder: Path, plan: Plan) -> str:
    """What `eyas run` would do with this folder, a line a step."""
    run = RunFolder(folder)
    rows, left, unknown = [], 0.0, False
    found = {step.name: run.step(step) for step in plan.steps}
    problems = {name: outputs.verify(there.out) for name, there in found.items() if there.out.exists()}
    sound = {name for name, problem in problems.items() if problem is None and not found[name].running}
    needed = plan.needed(sound)
    for step in plan.steps:
        there = found[step.name]
        if there.running:
            what = "runs now"
        elif step.name in sound:
            what = "finished, reused"
        elif step.name not in needed:
            what = "not needed: all that reads it is finished"
        else:
            seconds = expected(run.journal, step.name, step.step.work)
            left, unknown = left + (seconds or 0), unknown or seconds is None
            if step.name in problems:
                reason = str(problems[step.name])
            else:
                reason = "goes on where it stopped" if there.path.exists() else why(step, there.path.parent)
            what = f"would run ({reason})" + (f", about {duration(seconds)}" if seconds is not None else "")
        rows.append(f"{step.name:16}  {step.digest[:8]}  {what}")
    rows += _loads(plan, needed - sound)
    if (pays := found["pilot"].result().get("break_even") if "pilot" in sound else None) is not None:
        rows.append(f"A draft must reach {pays:.2f} tokens a step to pay on this server (from the pilot).")
    if left:
        rows.append(f"Expected: {'at least ' if unknown else ''}{duration(left)}.")
    return "\n".join(rows)


def _loads(plan: Plan, needed: set[str]) -> list[str]:
    """The server loads with their reasons; nothing where no server is needed."""
    found, (own, most) = loads.loads(plan, needed), loads.of_their_own(plan, needed)
    if not found and not own:
        return []
    lines = [f"Server loads: {len(found)}" + (f", and up to {most} more" if own else "")]
    lines += [f"  {load.service:14}  for {', '.join(load.steps)}" for load in found]
    lines += [f"  up to {most:<8}  that {' and '.join(own)} may start"] * bool(own)
    return lines


def read_status(folder: Path) -> dict[str, Any]:
    """How far a run is, as JSON. Raises UserError when this is no run folder."""
    run = RunFolder(folder)
    owner = lock.owner(folder)
    runner = {"pid": owner.get("pid"), "host": owner.get("host"), "running": process.alive(owner)}
    steps = [_status(name, step) for name, step in run.steps().items()]
    return {"run": str(folder), "runner": runner, "steps": steps}


def _status(name: str, step: StepFolder) -> dict[str, Any]:
    said, ended = step.progress(), step.exit()
    if step.running:
        state = "running"
    elif step.finished:
        state = "finished"
    elif ended.get("code"):
        state = "failed"
    else:
        state = "stopped" if process.who_runs(step.path) else "waiting"
    return {
        "step": name,
        "digest": step.path.name,
        "state": state,
        "done": said.done,
        "total": said.total,
        "unit": said.unit,
        "rate": said.rate if state == "running" else None,
        "eta": said.eta(time.time()) if state == "running" else None,
        "seconds": step.seconds(),
        "milestone": said.milestone,
        "error": ended.get("error") if state == "failed" else None,
        "folder": str(step.path),
    }


def as_text(status: dict[str, Any]) -> str:
    """The status for people."""
    runner = status["runner"]
    head = f"runner: process {runner['pid']} on {runner['host']}" if runner["running"] else "no runner"
    lines = [f"{status['run']}: {head}"]
    for step in status["steps"]:
        parts = [step["error"] or ""]
        if step["state"] == "running":
            if step["total"] is not None:
                parts.append(f"{amount(step['done'])}/{amount(step['total'])} {step['unit']}")
            if step["eta"] is not None:
                parts.append(f"{duration(step['eta'])} left")
            parts.append(step["milestone"])
        text = printable(", ".join(part for part in parts if part))
        lines.append(f"{step['step']:12}  {step['state']:8}  {duration(step['seconds']):>12}  {text}".rstrip())
    return "\n".join(lines)
