"""A run folder: where everything of one run stands. Its layout is in docs/seams.md."""

import contextlib
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.errors import UserError
from eyas.files import fsync_folder, number, read_json, write_atomic, write_json
from eyas.plan.digests import Plan, Planned
from eyas.run import outputs, process
from eyas.run.protocol import Follower, ProgressState

KEPT_DIGESTS = 2


class RunFolder:
    """Paths of a run folder, and what can be read from them. Making one touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.sqlite3"

    @property
    def forecast(self) -> Path:
        """What the runner expects of the run (`run/outlook.py`)."""
        return self.path / "forecast.json"

    def step(self, planned: Planned) -> "StepFolder":
        """Folder of a planned step."""
        return StepFolder(self.path / "steps" / planned.name / planned.digest)

    def service(self, planned: Planned) -> "StepFolder":
        """Folder of a planned service."""
        return StepFolder(self.path / "services" / planned.name / planned.digest)

    def steps(self) -> dict[str, "StepFolder"]:
        """Folders of the newest run's steps, in order, from plan.json. Raises UserError when this is no run folder."""
        try:
            steps = read_json(self.path / "plan.json")["steps"]
            return {step["name"]: StepFolder(self.path / "steps" / step["name"] / step["digest"]) for step in steps}
        except OSError as error:
            raise UserError(f"{self.path} is no run folder (it has no readable plan.json)") from error
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{self.path / 'plan.json'} names no steps, it is damaged: `eyas run` with the same run file mends it"
            ) from error

    def begin(self, plan: Plan, resolved: dict[str, Any]) -> None:
        """Write run.yaml, plan.json and versions.json; forget the verdict of an earlier run."""
        import yaml

        text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120)
        write_atomic(self.path / "run.yaml", text)
        steps = [
            {"name": p.name, "digest": p.digest, "entry": p.step.entry, "needs": list(p.step.needs)} for p in plan.steps
        ]
        services = [{"name": p.name, "digest": p.digest} for p in plan.services]
        write_json(self.path / "plan.json", {"seed": plan.seed, "steps": steps, "services": services})
        write_json(self.path / "versions.json", self.versions({}))
        for name in ("verdict.json", "report.html", "timeline.json", "forecast.json"):
            (self.path / name).unlink(missing_ok=True)

    def versions(self, results: dict[str, dict[str, Any]]) -> dict[str, str]:
        """What versions.json holds: ours, and those that the steps reported."""
        ours = {"eyas": __version__, "python": platform.python_version(), "platform": platform.platform()}
        for result in results.values():
            if isinstance(reported := result.get("versions"), dict):
                ours |= {str(name): str(version) for name, version in reported.items()}
        return ours

    def unwanted(self, plan: Plan) -> list["StepFolder"]:
        """Step and service folders of digests that the plan does not name, the last used first."""
        wanted = {self.step(p).path for p in plan.steps} | {self.service(p).path for p in plan.services}
        folders = [path for kind in ("steps", "services") for path in (self.path / kind).glob("*/*") if path.is_dir()]
        rest = [path for path in folders if path not in wanted]
        return [StepFolder(path) for path in sorted(rest, key=lambda path: path.stat().st_mtime, reverse=True)]

    def prune(self, plan: Plan) -> None:
        """After a run that succeeded: keep what it used, the two finished outputs of each step that were wanted last,
        and what the draft behind `draft` was made of."""
        behind_draft = self._made_of((self.path / "draft").resolve().parent)
        kept = Counter(planned.name for planned in plan.steps)
        for old in self.unwanted(plan):
            name = old.path.parent.name
            kept[name] += old.finished
            newest = old.finished and kept[name] <= KEPT_DIGESTS
            if not newest and old.path.resolve() not in behind_draft:
                outputs.remove(old.path)

    def _made_of(self, step: Path) -> set[Path]:
        """A step's folder and those of all steps whose outputs went into it, resolved."""
        found: set[Path] = set()
        todo = [step]
        while todo:
            if (step := todo.pop()) not in found:
                found.add(step)
                inputs = read_or_empty(step / "spec.json").get("inputs")
                if isinstance(inputs, dict):
                    todo += [step.parents[1] / path.parts[-3] / path.parts[-2] for path in map(Path, inputs.values())]
        return found

    def link_draft(self, out: Path) -> None:
        """Point `draft` to an exported draft, atomically."""
        new = self.path / f".draft.{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(out, self.path))
        new.replace(self.path / "draft")
        fsync_folder(self.path)


class StepFolder:
    """What the folder of one step (or service) says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def out(self) -> Path:
        """The finished output."""
        return self.path / "out"

    @property
    def finished(self) -> bool:
        """Whether there is a finished output (not whether it is undamaged: `outputs.verify`)."""
        return (self.out / outputs.LIST).is_file()

    @property
    def running(self) -> bool:
        """Whether its process runs on this machine."""
        return process.alive(process.who_runs(self.path))

    def result(self) -> dict[str, Any]:
        """Its result.json; empty while there is none."""
        return read_or_empty(self.out / "result.json")

    def exit(self) -> dict[str, Any]:
        """Its exit.json; empty while there is none."""
        return process.how_ended(self.path)

    def progress(self) -> ProgressState:
        """What it has said so far."""
        follower = Follower(self.path / "progress.jsonl")
        follower.read()
        return follower.state

    def seconds(self) -> float | None:
        """Seconds that it worked, all attempts together; None when it never started."""
        if (spent := number(self.exit().get("spent"))) is not None:
            return spent
        who = process.who_runs(self.path)
        started = number(who.get("started"))
        if started is None:
            return None
        until = time.time() if process.alive(who) else self._last_sign(started)
        return (number(who.get("spent")) or 0.0) + max(0.0, until - started)

    def last_log_line(self) -> str:
        """The last line in log.txt that says something; empty when there is none."""
        with contextlib.suppress(OSError), (self.path / "log.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""

    def _last_sign(self, default: float) -> float:
        for path in (self.out / outputs.LIST, self.path / "heartbeat"):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return default


def read_or_empty(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when it is missing or damaged."""
    with contextlib.suppress(OSError, UserError):
        value = read_json(path)
        if isinstance(value, dict):
            return value
    return {}
