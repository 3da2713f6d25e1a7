"""The table of `eyas doctor`: what was checked, what came of it, and how to mend what failed."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.run.protocol import printable
from eyas.ui.text import duration

WORDS = {True: "pass", False: "FAIL", None: "–"}
WIDTH = 110


def table(found: Mapping[str, Any]) -> str:
    """`{"checks": [{name, passed, detail, remedy}], "seconds"}` as text; `passed` None is a check not tried."""
    checks: Sequence[Mapping[str, Any]] = found["checks"]
    width = max((len(check["name"]) for check in checks), default=0)
    lines = []
    for check in checks:
        lines += _row(check, width)
    counts = {word: sum(check["passed"] is passed for check in checks) for passed, word in WORDS.items()}
    said = [f"{counts['pass']} passed", f"{counts['FAIL']} failed", f"{counts['–']} not tried"]
    return "\n".join([*lines, "", f"{', '.join(said)}, in {duration(found['seconds'])}"])


def _row(check: Mapping[str, Any], width: int) -> list[str]:
    head = f"{WORDS[check['passed']]:4}  {check['name']:{width}}  "
    room = max(30, WIDTH - len(head))
    detail = textwrap.wrap(printable(check["detail"], 2000), room) or [""]
    lines = [head + detail[0], *(" " * len(head) + more for more in detail[1:])]
    if check["passed"] is False and check["remedy"]:
        lines += [" " * len(head) + more for more in textwrap.wrap("→ " + printable(check["remedy"], 2000), room)]
    return [line.rstrip() for line in lines]
