"""Host keys: shown, and taken into the user's known_hosts on the user's word only."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import UserError
from eyas.hosts.record import Host
from eyas.hosts.ssh import program
from eyas.run.protocol import printable


@dataclass(frozen=True)
class Offered:
    """The key that a host shows now."""

    lines: str
    """As known_hosts has them."""
    fingerprints: list[str]
    known_hosts: Path
    """Where it would go."""
    names: list[str]
    """What known_hosts calls the host."""


def offered(host: Host) -> Offered:
    """Ask the host for its key, through the user's own configuration and jump hosts. Raises UserError."""
    settings = _settings(host)
    with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
        found = Path(folder, "known")
        asked = _run(
            [
                *program(host),
                *("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={found}"),
                *("-o", "GlobalKnownHostsFile=/dev/null", "-o", "PreferredAuthentications=none", "-o", "BatchMode=yes"),
                *("-o", "ControlPath=none", "-o", "UpdateHostKeys=no", "-o", "HashKnownHosts=no"),
                *("-o", f"ConnectTimeout={host.connect_seconds}", "-o", "LogLevel=ERROR"),
                *(host.ssh, "true"),
            ]
        )
        if not found.is_file():
            last = printable(next(iter(reversed(asked.stderr.splitlines())), "no key was offered"))
            raise UserError(f"{host.name} shows no host key: {last}")
        lines = found.read_text()
        fingerprints = _run(["ssh-keygen", "-l", "-f", str(found)]).stdout.splitlines()
    name = settings.get("hostkeyalias") or settings["hostname"]
    if settings["port"] != "22" and "hostkeyalias" not in settings:
        name = f"[{name}]:{settings['port']}"
    known = Path(settings["userknownhostsfile"].split()[0]).expanduser()
    return Offered(lines, fingerprints, known, [name])


def trust(key: Offered) -> None:
    """Put the key into known_hosts, in the place of any older one of this host. Raises OSError."""
    key.known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if key.known_hosts.exists():
        shutil.copy2(key.known_hosts, f"{key.known_hosts}.old")
        for name in key.names:
            _run(["ssh-keygen", "-R", name, "-f", str(key.known_hosts)])
    with key.known_hosts.open("a") as file:
        file.write(key.lines)
    key.known_hosts.chmod(0o600)


def _settings(host: Host) -> dict[str, str]:
    done = _run([*program(host), "-G", host.ssh])
    if done.returncode:
        raise UserError(f"{host.name}: ssh's configuration is not valid: {printable(done.stderr)}")
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
