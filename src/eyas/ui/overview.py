"""`eyas plan` and `eyas status`: a run before and while it goes on."""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.plan import forecast, loads
from eyas.plan.changes import why
from eyas.plan.digests import Plan
from eyas.plan.durations import Estimate
from eyas.plan.forecast import Forecast
from eyas.plan.schedule import State
from eyas.room import size
from eyas.run import lock, outputs, process, retention
from eyas.run.expected import here
from eyas.run.folder import RunFolder, StepFolder, read_or_empty
from eyas.run.machine import machine
from eyas.run.protocol import printable
from eyas.run.view import Ahead
from eyas.ui.text import amount, duration, outlook
from eyas.ui.watch import read_ahead, step_state


def planned(folder: Path, plan: Plan, resolved: dict[str, Any] | None = None) -> str:
    """What `eyas run` would do with this folder, a line a step, and how long that takes. `resolved` is the run file."""
    run = RunFolder(folder)
    rows = []
    found = {step.name: run.step(step) for step in plan.steps}
    problems = {name: outputs.verify(there.out) for name, there in found.items() if there.out.exists()}
    sound = {name for name, problem in problems.items() if problem is None and not found[name].running}
    needed = plan.needed(sound)
    expected = here(plan, machine(resolved or {}))
    estimates = expected.steps()
    for step in plan.steps:
        there = found[step.name]
        if there.running:
            what = "runs now"
        elif step.name in sound:
            what = "finished, reused"
        elif step.name not in needed:
            what = "not needed: all that reads it is finished"
        else:
            if step.name in problems:
                reason = str(problems[step.name])
            else:
                reason = "goes on where it stopped" if there.path.exists() else why(step, there.path.parent)
            what = f"would run ({reason}), {_estimated(estimates[step.name])}"
        rows.append(f"{step.name:16}  {step.digest[:8]}  {what}")
    rows += _loads(plan, needed - sound)
    if (pays := found["pilot"].result().get("break_even") if "pilot" in sound else None) is not None:
        rows.append(f"A draft must reach {pays:.2f} tokens a step to pay on this server (from the pilot).")
    done = sound | (found.keys() - needed)
    if done < found.keys():
        rows += _ahead(forecast.make(plan, estimates, expected.services(), State(set(done)), {}, {}))
    return "\n".join(rows)


def _estimated(estimate: Estimate) -> str:
    """`about 4 min 05 s (3 min to 6 min), 1.2 GB`."""
    sure = f"{duration(estimate.at(0.05))} to {duration(estimate.at(0.95))}"
    basis = "a guess" if estimate.rows == 0 else f"from {estimate.rows} run{'' if estimate.rows == 1 else 's'}"
    size = f", {amount(estimate.bytes)}B" if estimate.bytes else ""
    return f"about {duration(estimate.seconds)} ({sure}, {basis}){size}"


def _ahead(found: Forecast) -> list[str]:
    """When what runs, what waits for what, and when all is done."""
    spans = [(span, name) for name, span in found.run.steps.items()]
    spans += [(span, f"load {name}") for name, span in found.run.loads]
    rows = ["Timetable (* decides when the run ends):"]
    for span, name in sorted(spans, key=lambda item: item[0].start):
        beside = [
            other for there, other in spans if other != name and there.start < span.end and span.start < there.end
        ]
        meanwhile = f"  beside {', '.join(beside)}" if beside else ""
        star = "*" if name in found.chain else " "
        rows.append(f" {star}{duration(span.start):>12} to {duration(span.end):>12}  {name}{meanwhile}")
    saved = max(0.0, found.alone - found.seconds)
    sure = "a guess, from fewer than ten runs" if found.guess else "in 9 of 10 runs"
    return [
        *rows,
        f"Expected: {duration(found.seconds)} ({duration(found.low)} to {duration(found.high)}, {sure}); "
        f"one after another {duration(found.alone)}: overlap saves {duration(saved)}.",
    ]


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
    runs = process.alive(owner)
    runner = {
        "pid": owner.get("pid"),
        "host": owner.get("host"),
        "running": runs,
        "holding": runs and owner.get("holding") is True,
    }
    steps = [_status(name, step) for name, step in run.steps().items()]
    ahead = read_ahead(read_or_empty(run.forecast)) if runs else None
    return {
        "run": str(folder),
        "runner": runner,
        "ahead": asdict(ahead) if ahead else None,
        "steps": steps,
        "states": retention.taken(folder),
    }


def print_lines(folder: Path) -> None:
    """Print the status as a line of JSON a second, until the runner ends."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            status = read_status(folder)
            print(json.dumps({"t": time.time(), **status}, ensure_ascii=False), flush=True)
            if not status["runner"]["running"]:
                return
            time.sleep(1)


def _status(name: str, step: StepFolder) -> dict[str, Any]:
    said, ended, state = step.progress(), step.exit(), step_state(step)
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
    lines = [f"{status['run']}: {head}{', holds a server for a mended run' if runner['holding'] else ''}"]
    if status["ahead"]:
        lines.append(outlook(Ahead(**status["ahead"]), time.time()))
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
    if status["states"]:
        held = ", ".join(f"{size(taken)} of {step}" for step, taken in status["states"].items())
        lines.append(f"states on disk: {held} (`eyas store rm {status['run']}` frees them)")
    return "\n".join(lines)
