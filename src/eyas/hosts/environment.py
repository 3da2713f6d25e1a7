"""The interpreter that runs the runner there: the user's own, or an environment that is made once under host.root.

The environment holds the versions that are installed here, as far as they are; it is made by a detached job there, so
that a connection that breaks costs nothing, and used by all runs with the same lock.
"""

import hashlib
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from eyas.errors import UserError
from eyas.hosts.ssh import Link, patiently

MODULES = ("pydantic", "yaml", "rich", "typer", "xxhash", "torch", "transformers", "safetensors", "numpy", "jinja2")
EXTRAS = ("train", "report")
OLDEST = (3, 11)
NAME = re.compile(r"[A-Za-z0-9._-]+")


def lock() -> str:
    """What the environment holds, a requirement a line: all that ours need, in the versions that are here."""
    found: dict[str, str] = {}
    todo = [text for text in metadata.requires("eyas") or [] if _wanted(text)]
    while todo:
        text = todo.pop().partition(";")[0].strip()
        matched = NAME.match(text)
        assert matched is not None, text
        name = matched[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            version = metadata.version(name).partition("+")[0]  # A build for this machine's processors is of no use.
        except metadata.PackageNotFoundError:
            found[key] = text
            continue
        found[key] = f"{name}=={version}"
        if key != "torch":  # Its own needs differ from build to build.
            todo += [text for text in metadata.requires(name) or [] if ";" not in text]
    return "".join(f"{found[key]}\n" for key in sorted(found))


def _wanted(text: str) -> bool:
    """Whether a requirement of ours is for running: of no extra, or of those that steps need."""
    extra = re.search(r"""extra\s*==\s*['"](\w+)['"]""", text)
    return extra is None or extra[1] in EXTRAS


def ready(
    link: Link, there: dict[str, Any], code: str, say: Callable[[str], None], follow: Callable[[Link, str], int | None]
) -> str:
    """Path of the interpreter there, made if need be; `follow` shows a job there until it ends and returns its code.

    Raises UserError: the user's interpreter lacks packages, none is new enough, the environment cannot be made.
    """
    host = link.host
    if tuple(there["python"][:2]) < OLDEST:
        version = ".".join(map(str, there["python"]))
        raise UserError(
            f"{host.name}: {there['executable']} is Python {version}, 3.11 is needed: name another one by "
            f"`eyas host add {host.name} --python FILE`"
        )
    if host.python is not None:
        found = patiently(lambda: link.call("shelf.imports", modules=MODULES, python=there["executable"]), say)
        if found["missing"]:
            raise UserError(
                f"{host.name}: {host.python} lacks {', '.join(found['missing'])}: install them there, or leave out "
                "--python, and an environment is made under host.root"
            )
        return str(there["executable"])
    text = lock()
    digest = hashlib.sha256(repr((text, there["python"], there["executable"])).encode()).hexdigest()[:16]
    folder = f"{there['root']}/env/{digest}"
    python = f"{folder}/bin/python"
    if patiently(lambda: link.call("shelf.imports", ready=folder, modules=MODULES, python=python), say)["missing"]:
        name = f"env-{digest}"
        say(f"an environment is made in {folder}, once")
        script = f"{there['root']}/code/{code}/eyas/hosts/there/setup.py"
        command = [there["executable"], "-I", script, folder, f"{there['root']}/runners/{name}/lock.txt"]
        job = {"code": code, "command": [*command, *([host.wheels] if host.wheels else [])]}
        patiently(lambda: link.call("runners.start", name=name, job=job, files={"lock.txt": text}), say)
        if follow(link, name) != 0:
            raise UserError(
                f"{host.name}: the environment could not be made, the lines above say why: mend that, name an "
                "interpreter that has all by --python, or a folder of wheels by --wheels"
            )
    return python
