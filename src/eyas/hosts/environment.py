"""The interpreter that runs the runner there: the user's own, or an environment made once under host.root."""

from collections.abc import Callable
from typing import Any

from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.hosts.ssh import Link


def ready(link: Link, there: dict[str, Any], code: str, asked: RunConfig, say: Callable[[str], None]) -> str:
    if not link.host.python:
        raise UserError("not yet")
    return str(there["executable"])
