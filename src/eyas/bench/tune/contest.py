"""NCCL settings compete in a stand-alone all-reduce, so that only the best of them cost a server load.

Successive halving: every setting runs shortly; the slower half drops out, and whatever else is measurably slower than
the best; the others run twice as long. NCCL's own choice runs each time. What won of different variables is combined
for the last round. A run that hangs, fails or sums wrongly is a row with its cause.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench import measure
from eyas.bench.tune import allreduce
from eyas.bench.tune.space import Setting
from eyas.config import Server
from eyas.digests import digest_json
from eyas.engines.sglang import crash
from eyas.engines.sglang.command import environment
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress

KEPT = 2
"""Settings that are tried on the server."""
ROUNDS, REPEATS, CALLS = 3, 10, 20
SECONDS = 120.0
"""For one run, the start of its processes included."""
Env = Mapping[str, str]
Times = list[list[float]]
"""Seconds of an all-reduce, by message and repeat."""


@dataclass(frozen=True)
class Group:
    """The processes of an all-reduce and what they send."""

    python: str
    base: Mapping[str, str]
    """Environment of each process."""
    world: int
    elements: tuple[int, ...]
    """Of each message: requests at once x hidden size."""
    dtype: str
    backend: str = "nccl"
    first: int = 0
    """GPU of rank 0."""
    seconds: float = SECONDS

    def run(self, env: Env, repeats: int) -> Times:
        """One run of all messages. Raises UserError: it failed or took too long; nothing of it is left."""
        python = shutil.which(self.python, path=self.base.get("PATH"))
        if python is None:
            raise UserError(f"server.python: {self.python} is not there or cannot be run")
        with tempfile.TemporaryDirectory(prefix="eyas-allreduce-") as name:
            folder = Path(name)
            orders = {
                "backend": self.backend, "rendezvous": str(folder / "rendezvous"), "elements": list(self.elements),
                "dtype": self.dtype, "first": self.first, "repeats": repeats, "calls": CALLS,
            }  # fmt: skip
            line = [python, allreduce.__file__, json.dumps(orders)]
            with contextlib.ExitStack() as stack:
                told = {**self.base, **env}
                ranks = [stack.enter_context(_rank(line, told, i, self.world, folder)) for i in range(self.world)]
                _wait(ranks, self.seconds, folder)
            said = (folder / "rank0.out").read_text(encoding="utf-8", errors="replace").splitlines()
            found = [text.removeprefix(allreduce.BEGIN) for text in said if text.startswith(allreduce.BEGIN)]
            if not found:
                raise UserError(_cause(folder, 0))
            times: Times = json.loads(found[-1])["seconds"]
            return times


def group(config: Server, hidden_size: int, concurrencies: Sequence[int], dtype: str, folder: Path) -> Group:
    """The group that a server of this run file would be, and its messages in decoding."""
    first = config.args.get("base-gpu-id")
    return Group(
        config.python,
        environment(config, False, digest_json(str(folder.absolute()))[:16], None),
        config.tp,
        tuple(count * hidden_size for count in sorted(set(concurrencies))),
        dtype,
        first=first if isinstance(first, int) else 0,
    )


@contextlib.contextmanager
def _rank(line: list[str], env: Env, rank: int, world: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A rank for as long as the block lasts, with whatever it starts."""
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    with (folder / f"rank{rank}.out").open("wb") as out, (folder / f"rank{rank}.err").open("wb") as err:
        popen = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=out, stderr=err, env={**env, **told}, start_new_session=True
        )
    try:
        yield popen
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        assert popen.stdin is not None
        popen.stdin.close()
        popen.wait()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], seconds: float, folder: Path) -> None:
    """Until all have ended, or one has failed. Raises UserError."""
    deadline = time.monotonic() + seconds
    while (codes := [popen.poll() for popen in ranks]) and None in codes:
        if failed := [i for i, code in enumerate(codes) if code]:
            raise UserError(_cause(folder, failed[0]))
        if time.monotonic() > deadline:
            raise UserError(f"hung: no end within {seconds:g} s")
        time.sleep(0.02)
    if failed := [i for i, code in enumerate(codes) if code]:
        raise UserError(_cause(folder, failed[0]))


def _cause(folder: Path, rank: int) -> str:
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in crash.tail(folder / f"rank{rank}.err")]
    return f"rank {rank}: {crash.cause(lines) or (lines[-1].strip()[:200] if lines else 'ended without a word')}"


def play(
    candidates: Sequence[Env], run: Callable[[Env, int], Times], folder: Path, progress: Progress
) -> dict[str, Any]:
    """The contest: `rows` by round, and `best`, at most two settings that are faster than NCCL's own choice.

    Finished runs lie in `folder`, by what was run, and are not repeated. `ratio` of a row: how many times as fast as
    NCCL's own choice of the same round.
    """
    alive: list[Env] = list(candidates)
    rows: list[dict[str, Any]] = []
    ranked: list[tuple[Env, dict[str, Any]]] = []
    latest: dict[str, tuple[Env, dict[str, Any]]] = {}
    for number in range(ROUNDS):
        repeats = REPEATS * 2**number
        if number == ROUNDS - 1:
            alive += _combined(sorted(latest.values(), key=_slowness))
        own = _once({}, run, repeats, folder, progress)
        if isinstance(own, str):
            _file(folder, {}, repeats).unlink()
            raise UserError(f"NCCL's own choice fails in a stand-alone all-reduce, so no server can run: {own}")
        rows.append(_row({}, number, own, own))
        ranked = []
        for env in alive:
            found = _once(env, run, repeats, folder, progress)
            rows.append(_row(env, number, own, found))
            if not isinstance(found, str):
                ranked.append((env, rows[-1]["ratio"]))
                latest[rows[-1]["name"]] = ranked[-1]
        ranked.sort(key=_slowness)
        alive = _halved(ranked)
        if not alive:
            break
    best = [dict(env) for env, ratio in ranked if ratio["low"] is not None and ratio["low"] > 1][:KEPT]
    return {"rows": rows, "best": best}


def _slowness(pair: tuple[Env, dict[str, Any]]) -> float:
    return -float(pair[1]["ratio"])


def _halved(ranked: Sequence[tuple[Env, dict[str, Any]]]) -> list[Env]:
    """The better half, less those whose interval lies below the best one's."""
    good = [pair for pair in ranked if pair[1]["high"] >= ranked[0][1]["low"]]
    return [env for env, _ in good[: max(KEPT, math.ceil(len(ranked) / 2))]]


def _combined(ranked: Sequence[tuple[Env, dict[str, Any]]]) -> list[Env]:
    """The best setting of each variable that is faster than NCCL's own choice, together; none where only one is."""
    together: dict[str, str] = {}
    parts = 0
    for env, ratio in ranked:
        if ratio["low"] > 1 and not env.keys() & together.keys():
            together |= env
            parts += 1
    return [together] if parts > 1 else []


def _once(env: Env, run: Callable[[Env, int], Times], repeats: int, folder: Path, progress: Progress) -> Times | str:
    """Times, or why there are none."""
    path = _file(folder, env, repeats)
    if not path.exists():
        progress.milestone(f"all-reduce, {repeats} times: {Setting({}, env).name}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            said: dict[str, Any] = {"times": run(env, repeats), "failed": None}
        except UserError as error:
            said = {"times": None, "failed": str(error)}
        write_json(path, {"env": dict(env), **said})
    found = read_json(path)
    times: Times | str = found["failed"] or found["times"]
    return times


def _file(folder: Path, env: Env, repeats: int) -> Path:
    return folder / f"{digest_json([dict(env), repeats])[:16]}.json"


def _row(env: Env, number: int, own: Times, found: Times | str) -> dict[str, Any]:
    row = {"name": Setting({}, env).name, "round": number + 1, "failed": None, "microseconds": None, "ratio": None}
    if isinstance(found, str):
        return {**row, "failed": found}
    pairs = zip(own, found, strict=True)
    rates = [measure.rates_ratio([1 / one for one in base], [1 / one for one in times]) for base, times in pairs]
    return {
        **row,
        "microseconds": [round(1e6 * sorted(times)[len(times) // 2], 2) for times in found],
        "ratio": measure.mean_ratio(rates),
    }
