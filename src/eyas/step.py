"""One step, as a program: `python -m eyas.step NAME --spec spec.json --out DIR`.

The executor starts one such process for each step. DIR is the step's folder (docs/seams.md): the entry works in
`DIR/partial`, which becomes `DIR/out` once everything in it is complete and durable. Exit codes: 0 finished; 2 a
UserError, its line in exit.json; 75 a leased service died; anything else a fault, its traceback in the log.
"""

import argparse
import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.config import RunConfig, Section
from eyas.errors import UserError
from eyas.files import number, read_json, write_json
from eyas.plan import code
from eyas.run import outputs, process
from eyas.run.faults import IN_A_RUN, plain_errors
from eyas.run.protocol import ProgressWriter, printable
from eyas.spec import StepSpec

HEARTBEAT_SECONDS, FLUSH_SECONDS = 5.0, 0.5
KEYS = ("step", "entry", "digest", "code", "seed", "config", "inputs")


def main(arguments: list[str] | None = None) -> int:
    """Run one step and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m eyas.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="the step that spec.json must be for")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the step's folder")
    parser.add_argument("--check", action="store_true", help="import the entry, check the spec, run nothing")
    parser.add_argument("--service", action="store_true", help="the entry serves until it is ended")
    parser.add_argument("--lock", type=int, help="handle of DIR/lock, already locked by the executor")
    asked = parser.parse_args(arguments)
    try:
        if asked.check:
            with plain_errors(asked.out, IN_A_RUN):
                _prepare(asked.name, asked.spec)
            return 0
        with plain_errors(asked.out, IN_A_RUN):
            asked.out.mkdir(parents=True, exist_ok=True)
            attempt = _claim(asked.out, asked.lock)
    except UserError as error:
        print(f"eyas: {printable(str(error))}", file=sys.stderr)
        return 2
    return _attempt(asked, attempt)


def _claim(folder: Path, handle: int | None) -> int:
    """Hold the folder's lock until this process ends and say who it is; returns the number of this attempt."""
    if handle is None:
        handle = process.try_lock(folder / "lock")
        if handle is None:
            raise UserError(f"{folder}: this step is running already")
    os.set_inheritable(handle, False)
    before = process.who_runs(folder) or process.who_ran(folder)
    spent, started = number(before.get("spent")) or 0.0, number(before.get("started"))
    with contextlib.suppress(OSError):
        spent += max(0.0, (folder / "heartbeat").stat().st_mtime - started) if started is not None else 0.0
    attempt = int(number(before.get("attempt")) or 0) + 1
    who = {**process.identity(os.getpid()), "attempt": attempt, "started": time.time(), "spent": round(spent, 3)}
    write_json(folder / process.NOW, who)
    (folder / process.BEFORE).unlink(missing_ok=True)
    (folder / "exit.json").unlink(missing_ok=True)
    (folder / "ready.json").unlink(missing_ok=True)
    (folder / "heartbeat").touch()
    return attempt


def _attempt(asked: argparse.Namespace, attempt: int) -> int:
    """Run the entry and write exit.json, whatever happens."""
    folder: Path = asked.out
    exit_code, error = 0, None
    try:
        with plain_errors(folder, IN_A_RUN):
            _work(asked, attempt)
    except UserError as plain:
        exit_code, error = 2, printable(str(plain), 2000)
        # The cause may be a fault that only looks like the user's: keep its traceback for the log.
        traceback.print_exc()
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) and end.code else 1
        error = f"exit code {exit_code}"
    except BaseException as fault:
        traceback.print_exc()
        exit_code, error = 1, printable(f"{type(fault).__name__}: {fault}", 2000)
    who = process.who_runs(folder)
    now = time.time()
    seconds = max(0.0, now - (number(who.get("started")) or now))
    said = {
        "code": exit_code,
        "error": error,
        "seconds": round(seconds, 3),
        "spent": round(seconds + (number(who.get("spent")) or 0.0), 3),
    }
    try:
        write_json(folder / "exit.json", {**said, "attempt": attempt, "ended": now})
    except OSError:
        traceback.print_exc()
    return exit_code


def _work(asked: argparse.Namespace, attempt: int) -> None:
    folder: Path = asked.out
    progress = ProgressWriter(folder / "progress.jsonl", attempt)
    threading.Thread(target=_beat, args=(folder / "heartbeat", progress), daemon=True).start()
    if (folder / "out").exists():
        raise UserError(f"{folder / 'out'} is there already: delete the step's folder to run it again")
    spec, entry = _prepare(asked.name, asked.spec)
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    for torn in partial.rglob(".*.partial"):
        torn.unlink()
    if asked.service:
        entry(spec, partial, progress, lambda ready: write_json(folder / "ready.json", ready))
        raise RuntimeError("the service ended by itself")
    result = entry(spec, partial, progress)
    assert isinstance(result, dict), f"the entry of {spec.step} returned {type(result).__name__}, not a dict"
    progress.flush()
    outputs.publish(partial, folder / "out", result)


def _prepare(name: str, path: Path) -> tuple[StepSpec, Callable[..., Any]]:
    """Check spec.json and import the entry. Raises UserError, ImportError."""
    try:
        data = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the spec ({error.strerror})") from error
    missing = [key for key in KEYS if not isinstance(data, dict) or key not in data]
    if missing:
        raise UserError(f"{path}: not a step's spec, it lacks {', '.join(missing)}")
    if data["step"] != name:
        raise UserError(f"{path}: is for step {data['step']}, not {name}")
    if code.digest(data["entry"]) != data["code"]:
        raise UserError(f"the code of {name} was edited after the run began: run the same command again")
    inputs = {step: Path(out) for step, out in data["inputs"].items()}
    for section, info in RunConfig.model_fields.items():
        kind = info.annotation
        if section in data["config"] and isinstance(kind, type) and issubclass(kind, Section):
            try:
                kind.model_validate(data["config"][section])
            except ValueError as error:
                raise UserError(f"{path}: section {section} is not valid: {error}") from error
    spec = StepSpec(name, data["seed"], data["config"], inputs, data.get("services", {}))
    module, _, function = data["entry"].partition(":")
    return spec, getattr(importlib.import_module(module), function)


def _beat(path: Path, progress: ProgressWriter) -> None:
    """Show that this process lives, and say what `advance` summed up before the entry fell silent."""
    next_beat = 0.0
    while True:
        with contextlib.suppress(OSError):
            progress.flush()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_SECONDS
                path.touch()
        time.sleep(FLUSH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
