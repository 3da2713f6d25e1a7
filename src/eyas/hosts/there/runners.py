"""Runners on a host: started detached, followed, stopped."""

from __future__ import annotations

import base64
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from eyas.hosts.there.base import Refused, answer, digest_of, read_json, root_of, try_lock, write_json

QUIET_SECONDS = 60
"""A call whose near end has been silent for so long is alone: it ends."""
STOP_SECONDS = 60
HANDOVER_SECONDS = 15
CHUNK = 1 << 18


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a run's runner, detached, unless it runs; what is run was verified just before."""
    root = root_of(request)
    folder, job = root / "runners" / request["name"], request["job"]
    folder.mkdir(exist_ok=True, mode=0o700)
    lock = take_over(folder, root / "runs" / request["name"])
    if lock is None:
        return {"started": False, "job": read_json(folder / "job.json")}
    code = root / "code" / job["code"]
    if not code.is_dir() or digest_of(code) != job["code"]:
        raise Refused(f"{code}: is not what was shipped; run the same command again")
    (folder / "exit.json").unlink(missing_ok=True)
    for name, text in request.get("files", {}).items():
        (folder / name).write_text(text)
    with (folder / "log.txt").open("ab") as log:
        job["offset"] = log.tell()
    write_json(folder / "job.json", job)
    supervise(root, folder, job, lock)
    os.close(lock)
    return {"started": True, "job": job}


def take_over(folder: Path, run: Path) -> int | None:
    """The lock of a runner that has ended, or that only holds services for the next one; None while one works."""
    until, asked = time.monotonic() + 1, False
    while (lock := try_lock(folder / "lock")) is None and time.monotonic() < until:
        owner = read_json(run / "lock")
        if not asked and owner.get("holding") is True and alive(owner):
            os.kill(owner["pid"], signal.SIGUSR1)
            until, asked = until + HANDOVER_SECONDS, True
        time.sleep(0.05)
    return lock


def environment(root: Path, code: str) -> dict[str, str]:
    """Of our own programs here: only the verified code is imported, and nothing is compiled into it."""
    return {
        **os.environ,
        "PYTHONPATH": str(root / "code" / code),
        "PYTHONPYCACHEPREFIX": str(root / "env" / "pycache" / code),
    }


def supervise(root: Path, folder: Path, job: dict[str, Any], lock: int) -> None:
    """In a process of its own: run the runner, write down how it ended, then run the user's command."""
    if os.fork():
        return
    os.setsid()
    os.chdir(root)
    nothing, log = os.open(os.devnull, os.O_RDWR), os.open(folder / "log.txt", os.O_WRONLY | os.O_APPEND)
    for handle, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(handle, target)
    env = environment(root, job["code"])
    code = 1
    try:
        os.set_inheritable(lock, True)
        runner = subprocess.Popen(
            job["command"], cwd=root, env=env, stdin=subprocess.DEVNULL, pass_fds=(lock,), start_new_session=True
        )
        write_json(folder / "process.json", {**identity(runner.pid), "started": time.time()})
        code = runner.wait()
    except OSError as error:
        os.write(2, f"eyas: cannot start the runner: {error}\n".encode())
    finally:
        write_json(folder / "exit.json", {"code": code, "ended": time.time()})
        os.close(lock)
        if job.get("on_end"):
            env = {**os.environ, "EYAS_RUN": str(root / "runs" / folder.name), "EYAS_CODE": str(code)}
            subprocess.run(["/bin/sh", "-c", job["on_end"]], cwd=root, env=env, check=False)
        os._exit(0)


def identity(pid: int) -> dict[str, Any]:
    """Who a process is: the form of `eyas.run.process`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": pid, "start": int(fields[19]), "boot": boot, "host": socket.gethostname()}


def alive(who: dict[str, Any]) -> bool:
    """Whether that process still runs."""
    try:
        return identity(who["pid"]) == {key: who[key] for key in ("pid", "start", "boot", "host")}
    except (OSError, KeyError):
        return False


def state(request: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run's runner: running, ended with a code, gone without a word, or none."""
    folder = root_of(request) / "runners" / request["name"]
    if not (folder / "job.json").exists():
        raise Refused(
            f"no run {request['name']} was started here; started were: {', '.join(runners(folder)) or 'none'}"
        )
    return {**how(folder), "job": read_json(folder / "job.json")}


def runners(folder: Path) -> list[str]:
    """Names of the runs here."""
    return sorted(path.parent.name for path in folder.parent.glob("*/job.json"))


def how(folder: Path) -> dict[str, Any]:
    """Whether a runner runs, and the code with which it ended (null: it has not, or without a word)."""
    lock = try_lock(folder / "lock")
    if lock is None:
        return {"running": True, "code": None}
    os.close(lock)
    return {"running": False, "code": read_json(folder / "exit.json").get("code")}


def follow(request: dict[str, Any]) -> None:
    """Say what a runner's log says from an offset on, until the runner has ended."""
    root = root_of(request)
    folder, offset, heard = root / "runners" / request["name"], request["offset"], time.monotonic()
    answer({"log": "", "offset": offset})
    while True:
        now = how(folder)
        with (folder / "log.txt").open("rb") as log:
            log.seek(offset)
            new = log.read(CHUNK)
        if not now["running"] and not new:
            answer({**now, "last": True})
            return
        offset += len(new)
        if new:
            answer({"log": base64.b64encode(new).decode(), "offset": offset})
        if select.select([0], [], [], 0 if new else 0.2)[0]:
            if not os.read(0, 1 << 16):
                return
            heard = time.monotonic()
        if time.monotonic() - heard > QUIET_SECONDS:
            return


def ours(request: dict[str, Any]) -> dict[str, Any]:
    """Run one of our own commands here, with the verified code of a run, and return what it says."""
    root = root_of(request)
    job = read_json(root / "runners" / request["name"] / "job.json")
    if not job:
        state(request)
    if digest_of(root / "code" / job["code"]) != job["code"]:
        raise Refused("the code here is not what was shipped; run the same command again")
    command = [job["command"][0], "-P", "-m", "eyas", *request["command"], str(root / "runs" / request["name"])]
    done = subprocess.run(
        command,
        cwd=root,
        env=environment(root, job["code"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    said = (done.stdout or done.stderr).decode(errors="replace")
    return {"code": done.returncode, "said": said}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End a run's runner, which ends its steps; what it could not end is left to `eyas stop` here."""
    folder = root_of(request) / "runners" / request["name"]
    state(request)
    who, until, was = read_json(folder / "process.json"), time.monotonic() + STOP_SECONDS, how(folder)["running"]
    sign = signal.SIGTERM
    while how(folder)["running"]:
        if time.monotonic() > until:
            sign = signal.SIGKILL
        if alive(who):
            os.kill(who["pid"], sign)
        time.sleep(0.5 if sign == signal.SIGTERM else 0.05)
        who = read_json(folder / "process.json")
    return {"stopped": was}
