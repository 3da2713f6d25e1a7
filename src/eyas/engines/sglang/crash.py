"""Why a server ended, by its log."""

import re
import signal
from pathlib import Path

from eyas.engines.sglang.milestones import PREFIX, pieces

PORT_TAKEN = "its port is in use: take another in server.port, or leave that out"
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|NotFound)\w*(?::|$)")
_CONSEQUENCE = re.compile(
    r"^(EOFError|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError|asyncio\.|\S*CancelledError)"
    r"|scheduler died|died during init|child failed|Initialization failed\. Please see the error messages",
    re.IGNORECASE,
)
_ALIVE = re.compile(r'The server is fired up|"(?:GET|POST|PUT|HEAD) \S+ HTTP/[\d.]+" 200')
_EVIDENCE = re.compile(r"Error\b|Exception\b|\bERROR\b|\berror:|: No module named |\bwhat\(\):")
_MEMORY = "out of memory|Not enough memory|leave no GPU memory|OutOfMemoryError|DefaultCPUAllocator|std::bad_alloc"


def cause(lines: list[str], python: str = "python3") -> str | None:
    """Why a server ended, in one line with a remedy where one is known; None when its log does not tell.

    Only errors after the last sign of life count: what it survived did not end it.
    """
    lines = lines[max((at + 1 for at, line in enumerate(lines) if _ALIVE.search(line)), default=0) :]
    text = "\n".join(line for line in lines if _EVIDENCE.search(line) and not line.startswith("  "))
    if found := re.search(r"error: unrecognized arguments: (.+)", text):
        return f"this SGLang does not know {found[1].strip()}: take it out of server.args"
    if found := re.search(r"^(?:sglang serve|\S*launch_server(?:\.py)?): error: (.+)", text, re.M):
        return f"SGLang refuses its flags: {_short(found[1].strip(), 200)}; see server.args"
    if re.search(r"No module named '?sglang(\.launch_server)?(?![\w.])", text):
        return f"{python} has no SGLang: name the interpreter that has it in server.python"
    if re.search(r"address already in use|Errno 98", text, re.IGNORECASE):
        return PORT_TAKEN
    last = _last_exception(lines)
    if found := re.search(f".*(?:{_MEMORY}).*", text, re.IGNORECASE):
        said = last if re.search(_MEMORY, last, re.IGNORECASE) else PREFIX.sub("", found[0].strip())
        # Its share for weights and KV pool is too small for the one, or too large for what else is needed.
        change = "raise" if re.search("Not enough memory|leave no GPU memory", said) else "lower"
        remedy = (
            f"{change} mem-fraction-static in server.args, lower context-length, raise server.tp, or end other programs"
        )
        return f"out of memory ({_short(said, 160)}): {remedy}"
    return _short(last) if last else None


def by_code(code: int) -> str:
    """What an exit code alone tells; 128 + n: ended by signal n."""
    if code == 128 + signal.SIGKILL:
        return "killed by the system (for want of memory?) or by somebody"
    return f"ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"


def _last_exception(lines: list[str]) -> str:
    """Last line of the last traceback that tells of a cause and not of its consequence; empty when there is none.

    The scheduler's comes first, then those of processes that lost it.
    """
    found, inside = "", False
    for line in lines:
        bare = PREFIX.sub("", line)
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and not line.startswith((" ", "\t")) and _EXCEPTION.match(bare):
            inside = False
            if not _CONSEQUENCE.search(bare):
                found = bare.strip()
    return found


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def tail(log: Path, size: int = 2**20) -> list[str]:
    """The last lines of a log file; none when it is missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return pieces(file.read().decode("utf-8", "replace"))
    except OSError:
        return []
