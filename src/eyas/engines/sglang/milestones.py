"""What SGLang's log says of how far a start is.

Wording of 0.5.17 and 0.5.23. Every rank writes into the same log; lines of ranks other than the first are left out.
"""

import contextlib
import re
import threading
import time
from pathlib import Path

from eyas.progress import Progress

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<ranks>[^\]]*)\] ?")
_OTHER_RANK = re.compile(r"\b(?:TP|PP|DP|EP)0*[1-9]")
_COUNT = re.compile(r"(?P<what>[A-Za-z].*?): +\d+%.*?\| *(?P<done>\d+)/(?P<total>\d+) \[")
_WEIGHTS_END = re.compile(r"Load weight end\. .*?elapsed=([\d.]+) s")
_POOL = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")
_CONTEXT = re.compile(r"max_total_num_tokens=(\d+),.*context_len=(\d+)")
_GRAPHS_BEGIN = re.compile(r"Capture (?P<which>.*graph).* begin", re.IGNORECASE)
_GRAPHS_END = re.compile(r"Capture .*graph.* end\..*?elapsed=([\d.]+) s", re.IGNORECASE)
_ACCESS = re.compile(r'"(GET|POST|PUT|HEAD) \S+ HTTP/')


def pieces(text: str) -> list[str]:
    """Log lines; those that a progress bar wrote over each other count one by one."""
    return [piece for piece in re.split(r"[\r\n]+", _ESCAPE.sub("", text)) if piece.strip()]


def is_access(line: str) -> bool:
    """Whether a line only tells of a request, our own perhaps, and so is no sign of a start going on."""
    return _ACCESS.search(line) is not None


class Milestones:
    """Turns log lines into progress and durations."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        """Summed up of what has ended: `weights`, `graphs`."""
        self.last = ""
        """The last line that was no access line."""
        self._progress = progress
        self._counted = ("", 0)

    def feed(self, line: str) -> None:
        """Take in one line."""
        if is_access(line):
            return
        self.last = line.strip()
        prefix = PREFIX.match(line)
        if prefix and _OTHER_RANK.search(prefix["ranks"]):
            return
        text = line[prefix.end() :] if prefix else line
        if found := _COUNT.search(text):
            self._count(found)
        elif "Load weight begin" in text:
            self._progress.milestone("loading weights")
        elif found := _WEIGHTS_END.search(text):
            self._took("weights", float(found[1]))
            self._progress.milestone(f"weights loaded in {float(found[1]):.1f} s")
        elif found := _POOL.search(text):
            self._progress.milestone(f"KV pool of {int(found[1]):,} tokens")
            self._progress.metric(kv_tokens=int(found[1]))
        elif found := _GRAPHS_END.search(text):
            self._took("graphs", float(found[1]))
        elif found := _GRAPHS_BEGIN.search(text):
            self._progress.milestone(f"capturing {found['which']}s")
        elif found := _CONTEXT.search(text):
            self._progress.metric(kv_tokens=int(found[1]), context_length=int(found[2]))
        elif "Uvicorn running on" in text:
            self._progress.milestone("server listens, warming up")
        elif "The server is fired up" in text:
            self._progress.milestone("server is warm")

    def _count(self, found: re.Match[str]) -> None:
        """A progress bar: shards of the weights, or sizes of CUDA graphs."""
        done, total = int(found["done"]), int(found["total"])
        unit = "graphs" if "Capturing" in found["what"] else "shards"
        key = f"{unit} of {total}"
        if self._counted[0] != key or done < self._counted[1]:
            self._progress.total(total, unit, done=done)
        elif done > self._counted[1]:
            self._progress.advance(done - self._counted[1])
        self._counted = (key, done)

    def _took(self, what: str, seconds: float) -> None:
        self.seconds[what] = round(self.seconds.get(what, 0.0) + seconds, 3)
        self._progress.metric(**{f"{what}_seconds": seconds})


class Watch:
    """Follows a server's log in a thread of its own."""

    def __init__(self, log: Path, progress: Progress) -> None:
        self.milestones = Milestones(progress)
        self.lively = time.monotonic()
        """When something new was in the log."""
        self._log, self._over = log, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        offset, half = 0, b""
        while True:
            over = self._over.wait(0.2)
            with contextlib.suppress(OSError), self._log.open("rb") as file:
                file.seek(offset)
                data = file.read()
                offset += len(data)
                end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                whole, half = (half + data[:end], data[end:]) if end else (b"", half + data)
                for line in pieces(whole.decode("utf-8", "replace")):
                    if not is_access(line):
                        self.lively = time.monotonic()
                    self.milestones.feed(line)
            if over:
                return
