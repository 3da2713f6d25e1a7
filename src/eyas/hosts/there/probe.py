"""What a host has: GPUs and who holds them, processors, memory, disks, interpreters, running servers."""

from __future__ import annotations

import csv
import json
import mmap
import os
import platform
import pwd
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eyas.hosts.there.base import file_system, root_of

PACKAGES = ("sglang", "vllm", "torch", "transformers", "safetensors", "numpy", "jinja2", "matplotlib",
            "pydantic", "pyyaml", "rich", "typer", "xxhash")  # fmt: skip
GPU = ("index", "name", "memory.total", "memory.used", "pci.bus_id", "driver_version", "uuid")
SERVERS = ("sglang.launch_server", "vllm.entrypoints", "vllm serve", "sglang serve")
SPEED_BYTES = 1 << 28
VERSIONS = (
    "import json,sys\nfrom importlib import metadata as m\nv={}\n"
    "for p in json.loads(sys.argv[1]):\n try: v[p]=m.version(p)\n except m.PackageNotFoundError: pass\n"
    "print(json.dumps([list(sys.version_info[:3]),v]))"
)


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Look at everything; nothing is changed but a file under root, written and read for its speed."""
    root = root_of(request)
    return {
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "system": platform.platform(),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "gpus": gpus(),
        "cuda": cuda(),
        "topology": said("nvidia-smi", "topo", "-m"),
        "numa": {path.name: path.joinpath("cpulist").read_text().strip() for path in nodes()},
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "limits": limits(),
        "memory": memory(),
        "shm": space(Path("/dev/shm")),
        "disks": disks(),
        "root": {"path": str(root), **space(root), **speed(root)},
        "interpreters": {name: interpreter(name) for name in [sys.executable, *request["interpreters"]]},
        "paths": {name: about(Path(name)) for name in request["paths"]},
        "rsync": shutil.which("rsync") is not None,
        "servers": servers(),
    }


def said(*command: str) -> str | None:
    """What a program prints; None where there is none or it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def gpus() -> list[dict[str, Any]]:
    """Each GPU as the driver sees it, memory in MiB, and the processes that hold it."""
    found = []
    held: dict[str, list[dict[str, Any]]] = {}
    for uuid, pid, used in rows("--query-compute-apps=gpu_uuid,pid,used_memory"):
        held.setdefault(uuid, []).append({"pid": int(pid), "mib": used, "user": owner(pid)})
    for values in rows("--query-gpu=" + ",".join(GPU)):
        gpu: dict[str, Any] = {key: values[number] for number, key in enumerate(GPU)}
        bus = gpu["pci.bus_id"].lower()[-12:]
        node = Path("/sys/bus/pci/devices", bus, "numa_node")
        found.append(
            {
                "name": gpu["name"],
                "mib": int(float(gpu["memory.total"])),
                "used_mib": int(float(gpu["memory.used"])),
                "driver": gpu["driver_version"],
                "numa": int(node.read_text()) if node.exists() else None,
                "held_by": held.get(gpu["uuid"], []),
            }
        )
    return found


def rows(query: str) -> list[list[str]]:
    """Lines of nvidia-smi's table."""
    text = said("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def owner(pid: str) -> str | None:
    """Whose process it is; None when it is in another container, or gone."""
    try:
        return pwd.getpwuid(Path("/proc", pid).stat().st_uid).pw_name
    except (OSError, KeyError):
        return None


def cuda() -> str | None:
    """Newest CUDA that the driver can do."""
    _, _, after = (said("nvidia-smi") or "").partition("CUDA Version:")
    return after.split()[0] if after else None


def nodes() -> list[Path]:
    """Folders of the NUMA nodes."""
    return sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def limits() -> dict[str, Any]:
    """What the cgroup allows: bytes of memory, processors; null where it sets no limit."""
    found: dict[str, Any] = {"memory": None, "cores": None}
    group = Path("/sys/fs/cgroup")
    try:
        text = (group / "memory.max").read_text().strip()
        found["memory"] = None if text == "max" else int(text)
        quota, period = (group / "cpu.max").read_text().split()
        found["cores"] = None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    return found


def memory() -> dict[str, int]:
    """Bytes of memory."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {"total": int(lines["MemTotal"].split()[0]) << 10, "free": int(lines["MemAvailable"].split()[0]) << 10}


def space(place: Path) -> dict[str, Any]:
    """Kind, size and free bytes of the file system at a place."""
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return {"kind": None, "total": 0, "free": 0}
    return {"kind": file_system(place)[0], "total": usage.total, "free": usage.free}


def disks() -> dict[str, dict[str, Any]]:
    """Mounted disks, by mount point, each device once."""
    found: dict[str, dict[str, Any]] = {}
    devices = set()
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount = line.split()[:2]
        place = Path(mount.encode().decode("unicode_escape"))
        if (device.startswith("/dev/") or ":" in device) and device not in devices and place.is_dir():
            devices.add(device)
            found[str(place)] = space(place)
    return found


def speed(root: Path) -> dict[str, float | None]:
    """MB a second at which root's disk takes and gives back a file, past the page cache where it can."""
    path, found = root / f".speed.{os.getpid()}", {"write_mb": 0.0, "read_mb": 0.0}
    if shutil.disk_usage(root).free < 8 * SPEED_BYTES:
        return {"write_mb": None, "read_mb": None}
    piece = mmap.mmap(-1, 1 << 22)
    piece.write(os.urandom(1 << 22))
    try:
        began = time.monotonic()
        with path.open("wb") as file:
            for _ in range(SPEED_BYTES >> 22):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        found["write_mb"] = round(SPEED_BYTES / 1e6 / (time.monotonic() - began), 1)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            handle = os.open(path, os.O_RDONLY)
        began = time.monotonic()
        while os.readv(handle, [piece]):
            pass
        os.close(handle)
        found["read_mb"] = round(SPEED_BYTES / 1e6 / (time.monotonic() - began), 1)
    finally:
        path.unlink()
    return dict(found)


def interpreter(name: str) -> dict[str, Any]:
    """Version of an interpreter and of the packages that matter; empty where there is none."""
    text = said(str(Path(name).expanduser()), "-c", VERSIONS, json.dumps(PACKAGES))
    if text is None:
        return {}
    version, packages = json.loads(text.splitlines()[-1])
    return {"python": ".".join(map(str, version)), "packages": packages}


def about(path: Path) -> dict[str, Any]:
    """Size of a file or folder, with what a model's config says of its states; empty where there is none."""
    path = path.expanduser()
    if not path.exists():
        return {}
    files = [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]
    found: dict[str, Any] = {"bytes": sum(one.stat().st_size for one in files), **space(path)}
    try:
        config = json.loads((path / "config.json").read_text())
        config = config.get("text_config", config)
        found["hidden_size"], found["layers"] = config["hidden_size"], config["num_hidden_layers"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return found


def servers() -> list[dict[str, Any]]:
    """Running SGLang and vLLM servers: of their flags only model and port, since others may be secret."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(name in " ".join(words) for name in SERVERS) and "-c" not in words[:3]:
            flags = {word: words[number + 1] for number, word in enumerate(words[:-1])}
            model = flags.get("--model-path") or flags.get("--model")
            found.append({"pid": int(path.name), "user": owner(path.name), "model": model, "port": flags.get("--port")})
    return found
