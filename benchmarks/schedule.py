"""The schedule against running one after another and against the optimum; its estimates; what the runner costs.

    python benchmarks/schedule.py [--part mission|random|estimates|served|overhead]

`mission` and `estimates` run on a virtual clock, with the durations of mission.json (which says which are recorded and
which invented). `served` and `overhead` run real steps that sleep. Writes benchmarks/results/DATE-schedule.json.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "tests")]
STATE = tempfile.TemporaryDirectory(prefix="eyas-state-")
os.environ["XDG_STATE_HOME"] = STATE.name

from eyas.plan import forecast, simulate  # noqa: E402
from eyas.plan.digests import Plan, make  # noqa: E402
from eyas.plan.durations import History, Kind, Row  # noqa: E402
from eyas.plan.graph import Step  # noqa: E402
from eyas.plan.schedule import Problem, State, Task  # noqa: E402
from eyas.run import session  # noqa: E402
from eyas.ui.plain import Plain  # noqa: E402
from optimum import optimum  # noqa: E402

MISSION = json.loads((HERE / "mission.json").read_text())


def mission() -> Problem:
    """The problem of mission.json."""

    def task(said: dict[str, Any]) -> Task:
        needs, leases = frozenset(said.get("needs", ())), frozenset(said.get("leases", ()))
        return Task(said["name"], said["seconds"], needs, said.get("takes", {}), leases, said.get("alone", False))

    steps, services = ({one["name"]: task(one) for one in MISSION[kind]} for kind in ("steps", "services"))
    return Problem(steps, services, MISSION["capacity"])


def compare(problem: Problem) -> dict[str, float]:
    """Seconds one after another, by the schedule, at best; shares of the saving."""
    sequential = simulate.one_after_another(problem)
    plain = simulate.simulate(problem, problem.remaining).seconds
    found = simulate.simulate(problem, simulate.best_order(problem))
    best = optimum(problem, found.seconds)
    return {
        "one_after_another": sequential,
        "longest_path_first": plain,
        "scheduled": found.seconds,
        "optimum": best,
        "saving_share_of_one_after_another": (sequential - found.seconds) / sequential,
        "share_of_the_optimum_saving": (sequential - found.seconds) / (sequential - best) if sequential > best else 1.0,
        "loads": len(found.loads),
    }


def random_problems(count: int = 400) -> dict[str, float]:
    """Small graphs with servers, shares of resources and steps that measure: times the optimum."""
    dice, plain, chosen = random.Random(5), [], []
    for _ in range(count):
        services = {
            f"v{n}": Task(f"v{n}", dice.uniform(1, 9), takes={"gpu": 1.0} if dice.random() < 0.8 else {})
            for n in range(dice.randint(0, 2))
        }
        steps: dict[str, Task] = {}
        for number in range(dice.randint(3, 8)):
            needs = frozenset(name for name in steps if dice.random() < 0.3)
            leases = frozenset([dice.choice(sorted(services))] if services and dice.random() < 0.35 else [])
            shares = ({}, {"gpu": 1.0}, {"cores": 0.5}, {"cores": 1.0}, {"disk": 1.0}, {"gpu": 1.0, "cores": 0.5})
            takes = {} if leases else dice.choice(shares)
            steps[f"s{number}"] = Task(f"s{number}", dice.uniform(1, 10), needs, takes, leases, dice.random() < 0.15)
        problem = Problem(steps, services)
        first = simulate.simulate(problem, problem.remaining).seconds
        found = simulate.simulate(problem, simulate.best_order(problem)).seconds
        best = optimum(problem, found)
        plain.append(first / best)
        chosen.append(found / best)
    return {
        "graphs": count,
        "longest_path_first_mean": statistics.mean(plain),
        "longest_path_first_worst": max(plain),
        "scheduled_mean": statistics.mean(chosen),
        "scheduled_worst": max(chosen),
        "optimal_share": sum(ratio < 1 + 1e-9 for ratio in chosen) / count,
    }


def mission_plan() -> Plan:
    """The mission as a plan, for the forecast; its shares of resources as whole ones (no two of them meet in it)."""

    def step(said: dict[str, Any]) -> Step:
        takes = tuple(name for name, amount in said.get("takes", {}).items() if name == "gpu")
        lists = {key: tuple(said.get(key, ())) for key in ("needs", "leases")}
        return Step(said["name"], f"toys:{said['name']}", resources=takes, alone=said.get("alone", False), **lists)

    steps, services = (tuple(step(one) for one in MISSION[kind]) for kind in ("steps", "services"))
    return make(steps, {}, 0, services)


def drawn(base: dict[str, float], spread: dict[str, float], common: float, dice: random.Random) -> dict[str, float]:
    """What each thing takes in one run: logarithms vary by `spread`, of which all share a part."""
    shared = math.sqrt(common) * dice.gauss(0, 1)
    return {
        name: seconds * math.exp(spread[name] * (shared + math.sqrt(1 - common) * dice.gauss(0, 1)))
        for name, seconds in base.items()
    }


def estimates(runs: int = 200) -> dict[str, Any]:
    """Replayed runs with noise like that measured: how often the 90 % range covers the end, and how wide it is."""
    plan = mission_plan()
    base = {one["name"]: one["seconds"] for kind in ("steps", "services") for one in MISSION[kind]}
    noise = MISSION["noise"]
    told: dict[str, Any] = {}
    for past in (3, 10, 30):
        dice, inside, widths, errors = random.Random(past), 0, [], []
        for _ in range(runs):
            spread = {name: dice.choice(noise["spread"]) for name in base}
            common = dice.choice(noise["common"])

            rows = [
                Row(number, f"toys:{name}", name, "h", "b", "d", "m", False, None, seconds, 0.0, True)
                for number in range(past)
                for name, seconds in drawn(base, spread, common, dice).items()
            ]
            history = History(rows)
            known = {name: history.expect(Kind(f"toys:{name}", name, "h", "d", "m"), None) for name in base}
            steps = {one.name: known[one.name] for one in plan.steps}
            services = {one.name: known[one.name] for one in plan.services}
            found = forecast.make(plan, steps, services, State(), {}, {}, draws=40)
            really = drawn(base, spread, common, dice)
            end = simulate.simulate(found.problem, found.order, steps=really, loads=really).seconds
            inside += found.low <= end <= found.high
            widths.append((found.high - found.low) / found.seconds)
            errors.append(abs(found.seconds / end - 1))
        told[f"after_{past}_runs"] = {
            "replayed": runs,
            "covered": inside / runs,
            "median_width_share_of_total": statistics.median(widths),
            "median_error_of_total": statistics.median(errors),
            "called_a_guess": found.guess,
        }
        print(f"after {past} runs", told[f"after_{past}_runs"], flush=True)
    return told


def sleeping(chained: bool) -> Plan:
    """Real steps that sleep, with a server that sleeps while it loads; `chained`: one after another."""
    seconds = {"corpus": 6, "answers": 3, "start": 4, "train": 4, "replay": 3, "bench": 2}
    sections = {f"{name}-seconds": {"sleep": each} for name, each in seconds.items()}
    sections |= {"load-seconds": {"load": 8}}

    def step(name: str, *needs: str, **more: Any) -> Step:
        return Step(name, "sleepers:work", needs, sections=(f"{name}-seconds",), **more)

    def service(name: str, need: str | None) -> Step:
        needs = (need,) if need else ()
        return Step(name, "sleepers:serve", needs, sections=("load-seconds",), resources=("gpu",))

    steps = (
        step("corpus"),
        step("start", *(("corpus",) * chained)),
        step("answers", "corpus", leases=("server",)),
        step("train", "answers", "start", resources=("gpu",)),
        step("replay", "train"),
        step("bench", "train", *(("replay",) * chained), leases=("drafted",)),
    )
    services = (service("server", "start" if chained else None), service("drafted", "replay" if chained else "train"))
    return make(steps, sections, 0, services)


def run_for_real(plan: Plan) -> tuple[float, Path]:
    """Seconds that a plan takes from its first step or load to the last end; and the run folder."""
    folder = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    outcome = session.run(folder / "run", plan, {"name": "sleep"}, Plain())
    assert outcome.code == 0
    return time.perf_counter() - began, folder / "run"


def served() -> dict[str, float]:
    """Overlapped against one after another, for real; what the plan said the overlap would save."""
    session.report = lambda folder, strict=True: []
    sequential, _ = run_for_real(sleeping(chained=True))  # Its durations are the history of the other.
    overlapped, folder = run_for_real(sleeping(chained=False))
    first = json.loads((folder / "forecast.json").read_text())["first"]
    predicted = first["one_after_another"] - (first["end"] - first["t"])
    return {
        "one_after_another": sequential,
        "overlapped": overlapped,
        "saved": sequential - overlapped,
        "saved_predicted": predicted,
        "saved_share_of_predicted": (sequential - overlapped) / predicted,
    }


def overhead(seconds: float = 110) -> dict[str, float]:
    """What the runner itself takes while a graph of twenty steps and a server sleeps: processor time and memory."""
    sections = {"s": {"sleep": seconds / 5 - 1.0}, "load-seconds": {"load": 2}}
    folder = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    (folder / "said.json").write_text(json.dumps(sections))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "schedule.py"), "--runner", str(folder)]
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as runner:
        peak = used = 0.0
        while runner.poll() is None:
            try:
                status = Path(f"/proc/{runner.pid}/status").read_text()
                peak = max(peak, *(float(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
                fields = Path(f"/proc/{runner.pid}/stat").read_text().rpartition(")")[2].split()
                used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            except (OSError, ValueError, TypeError):
                break
            time.sleep(0.2)
        assert runner.wait() == 0
    wall = time.perf_counter() - began
    return {"wall": wall, "processor": used, "processor_share": used / wall, "peak_mib": peak / 1024, "steps": 20}


def overhead_plan(sections: dict[str, Any]) -> Plan:
    """See `overhead`."""
    steps: tuple[Step, ...] = ()
    for number in range(20):
        needs = (f"s{number - 4}",) if number >= 4 else ()
        leases = ("server",) if number % 4 == 3 else ()
        steps += (Step(f"s{number}", "sleepers:work", needs, sections=("s",), leases=leases),)
    return make(steps, sections, 0, (Step("server", "sleepers:serve", sections=("load-seconds",)),))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--runner", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.runner:
        session.report = lambda folder, strict=True: []
        plan = overhead_plan(json.loads((asked.runner / "said.json").read_text()))
        sys.exit(session.run(asked.runner / "run", plan, {"name": "sleep"}, Plain()).code)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    date = datetime.date.today().isoformat()
    path = HERE / "results" / f"{date}-schedule.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    told |= {"date": date, "commit": commit, "device": {"processor": platform.machine(), "cores": os.cpu_count()}}
    for name, part in PARTS.items():
        if asked.part in (None, name):
            began = time.perf_counter()
            told[name] = part()
            print(name, f"{time.perf_counter() - began:.1f} s", json.dumps(told[name], indent=1), flush=True)
            path.write_text(json.dumps(told, indent=1) + "\n")


PARTS = {
    "mission": lambda: compare(mission()),
    "random": random_problems,
    "estimates": estimates,
    "served": served,
    "overhead": overhead,
}

if __name__ == "__main__":
    main()
