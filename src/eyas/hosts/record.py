"""What is known of a host: the user's own settings (`eyas host add`) and what was found there (`eyas host probe`)."""

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError

from eyas.config import NOT_YAML, Section
from eyas.errors import UserError
from eyas.files import plain_os_errors, read_json, write_atomic, write_json

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _there(path: str) -> str:
    if not path.startswith(("/", "~/")):
        raise ValueError("write a whole path, /… or ~/…")
    return path


PathThere = Annotated[str, AfterValidator(_there)]


class Host(Section):
    """A host's settings."""

    name: str = Field(max_length=60, pattern=NAME)
    ssh: str = Field(pattern=r"^[^-\s]\S*$")
    """Destination for the system's ssh, with all that the user's ssh configuration says of it."""
    root: PathThere
    """Folder there for code, data, environments and runs: on a disk that stays."""
    python: PathThere | None = None
    """The user's own interpreter there, never modified; default: an environment is made under root."""
    ssh_config: str | None = None
    """Another ssh configuration file than the user's (`ssh -F`)."""
    multiplex: bool = True
    """Share one connection; false for hosts that do not allow it."""
    alive_seconds: int = Field(default=15, ge=1, le=300)
    """A connection that is silent for three times as long is taken as lost."""
    connect_seconds: int = Field(default=20, ge=1, le=300)
    bandwidth_kib: int | None = Field(default=None, ge=1)
    """Most KiB a second for data."""
    wheels: PathThere | None = None
    """Folder there with wheels, for an environment that is made without a network."""
    lasting: bool = True
    """False: root may lie on a container's own layer or in memory, and is lost with it."""
    on_end: str | None = None
    """Command of the user, run there when a run has ended, with EYAS_RUN and EYAS_CODE set."""


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "eyas" / "hosts"


def settings(name: str) -> Path:
    """Where a host's settings are."""
    return _folder("XDG_CONFIG_HOME", ".config") / f"{name}.yaml"


def probed(name: str) -> Path:
    """Where the newest probe of a host is."""
    return _folder("XDG_STATE_HOME", ".local/state") / f"{name}.json"


def save(host: Host) -> Path:
    """Write a host's settings, mode 0600."""
    path = settings(host.name)
    with plain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, yaml.safe_dump(host.model_dump(exclude_defaults=True), sort_keys=False))
        path.chmod(0o600)
    return path


def make(values: dict[str, Any], where: str) -> Host:
    """Checked settings; `where` names them in errors. Raises UserError."""
    try:
        return Host.model_validate(values)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise UserError(f"{where}: {'; '.join(wrong)}") from error


def load(name: str) -> Host:
    """A host that was added. Raises UserError: there is none of this name, its file is damaged."""
    path = settings(name)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(names())
        raise UserError(
            f"{name}: no such host ({f'known: {known}' if known else 'none is known'}); "
            f"`eyas host add {name} --root DIR` makes it known"
        ) from None
    except NOT_YAML as error:
        raise UserError(f"{path}: not valid YAML; mend it, or `eyas host add {name}` again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds no settings; `eyas host add {name}` again")
    return make(data, str(path))


def names() -> list[str]:
    """The hosts that were added."""
    return sorted(path.stem for path in settings("x").parent.glob("*.yaml"))


def remove(name: str) -> None:
    """Forget a host; what lies there stays. Raises UserError when there is none of this name."""
    load(name)
    settings(name).unlink()
    probed(name).unlink(missing_ok=True)


def save_probe(name: str, found: dict[str, Any]) -> Path:
    """Keep what was found on a host."""
    path = probed(name)
    with plain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(path, found)
    return path


def last_probe(name: str) -> dict[str, Any] | None:
    """What was found when the host was probed last; None when it never was."""
    path = probed(name)
    if not path.is_file():
        return None
    found = read_json(path)
    return found if isinstance(found, dict) else None
