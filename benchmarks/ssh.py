"""What the link to a host costs: calls on a warm connection, and shipping data beside plain rsync.

    python benchmarks/ssh.py [--mib 512] [--link-mb 50] [--results DIR]

Against an sshd of the tests on loopback (`make .venv-ssh/.ready`), through a proxy that lets --link-mb MB a second by,
and without it. A transfer is all of `ship.send_data`: digest here, rsync, digest there, renaming. Rounds are taken in
turns; the ratio is plain seconds over ours, medians.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "ssh")]

from loopback import Proxy, Server  # noqa: E402

from eyas.hosts import ship  # noqa: E402
from eyas.hosts.ssh import Link  # noqa: E402
from eyas.progress import Silent  # noqa: E402

ROUNDS, CALLS = 3, 20


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


def transfers(link: Link, folder: Path, size: int) -> dict[str, object]:
    """Shipping a new file of `size` bytes in turns with plain rsync over the same connection settings."""
    ours, plain = [], []
    for number in range(ROUNDS):
        file = folder / f"data{number}"
        with file.open("wb") as out:
            for _ in range(size >> 20):
                out.write(os.urandom(1 << 20))
        command = ["rsync", "-t", "-e", shlex.join(link.ssh), str(file), f"{link.host.ssh}:{folder}/plain{number}"]
        plain.append(seconds(lambda command=command: subprocess.run(command, check=True)))
        ours.append(seconds(lambda file=file: ship.send_data(link, ship.parcel({"data": file}), True, Silent())))
    ratio = statistics.median(plain) / statistics.median(ours)
    return {"plain_seconds": plain, "ours_seconds": ours, "ratio": round(ratio, 3)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--link-mb", type=float, default=50.0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as name:
        folder = Path(name)
        os.environ |= {"XDG_CONFIG_HOME": f"{name}/xdg", "XDG_RUNTIME_DIR": name}
        server = Server(folder)
        assert server.bin is not None, "needs rsync"
        os.environ["PATH"] = f"{server.bin}:{os.environ['PATH']}"
        server.start()
        proxy = Proxy(server.port)
        proxy.bytes_a_second = asked.link_mb * 1e6
        try:
            direct = Link(server.host(folder / "root", alive_seconds=15))
            direct.call("shelf.hello")
            calls = [seconds(lambda: direct.call("shelf.hello")) for _ in range(CALLS)]
            bare = [seconds(lambda: subprocess.run([*direct.ssh, "box", "true"], check=True)) for _ in range(CALLS)]
            narrow = Link(server.host(folder / "root", server.client(proxy.port, name="narrow"), alive_seconds=15))
            commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
            found = {
                "commit": commit.stdout.strip(),
                "device": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
                "call_seconds": {"median": round(statistics.median(calls), 4), "longest": round(max(calls), 4)},
                "bare_ssh_seconds": round(statistics.median(bare), 4),
                "mib": asked.mib,
                "loopback": transfers(direct, folder, asked.mib << 20),
                "link_mb": asked.link_mb,
                "narrow": transfers(narrow, folder, asked.mib << 20),
            }
        finally:
            proxy.close()
            server.stop()
    print(json.dumps(found, indent=1))
    asked.results.mkdir(exist_ok=True)
    (asked.results / f"{time.strftime('%Y-%m-%d')}-ssh.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
