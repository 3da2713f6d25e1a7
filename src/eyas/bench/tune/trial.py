"""Trials on servers: one server at a time, every load counted, every finished trial a file that is not made again."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from eyas.bench import baseline, measure
from eyas.bench.measure import Block, Load, Prompt
from eyas.bench.tune.space import SAID, Setting
from eyas.config import Server
from eyas.digests import digest_json
from eyas.engines.sglang import info
from eyas.engines.sglang.http import ServerDied
from eyas.engines.sglang.server import Running, started
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.progress import Progress

RUNGS = (1, 2, 4)
"""Times bench.rounds: how many blocks a figure has before it is looked at again, and at last."""
ENDING_SECONDS = 3.0
Blocks = Mapping[int, Sequence[Block]]
"""Blocks of a server, by requests under way at once."""


class TooLongError(UserError):
    """A trial did not end in time."""


@dataclass(frozen=True)
class Trial:
    """What came of a setting."""

    setting: Setting
    blocks: dict[int, list[Block]]
    failed: str | None
    """Why there are no blocks."""
    loads: int
    """Server loads that it took: none where its server was up already."""
    start_seconds: float | None
    seconds: float
    served: dict[str, Any]
    """What its server says of the settings that are searched, if this trial loaded it."""

    def figures(self) -> dict[str, Any]:
        """FIG of docs/seams.md by requests at once."""
        return {str(concurrency): measure.figures(blocks) for concurrency, blocks in self.blocks.items()}


def compared(base: Blocks, other: Blocks) -> dict[str, float | None]:
    """How many times as fast the second is, with its 95 % interval; several concurrencies by their geometric mean."""
    return measure.mean_ratio([measure.ratio(base[concurrency], other[concurrency]) for concurrency in other])


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises TooLongError inside the block once its time is over, wherever it waits. In the main thread only."""

    def over(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"hung: no end within {seconds:g} s (tune.deadline)")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Question:
    """What every trial is asked."""

    prompts: Sequence[Prompt]
    concurrencies: Sequence[int]
    rounds: int
    max_new_tokens: int
    seconds: float
    """Until a trial counts as hung."""

    def load(self, concurrency: int) -> Load:
        """How the prompts are asked at a concurrency."""
        return Load(concurrency, self.max_new_tokens)


class Trials:
    """Measures settings of one target, in `folder`. Use as a context: at its end no server is left."""

    def __init__(
        self,
        config: Server,
        target: TargetInfo,
        dtype: str,
        version: str,
        question: Question,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._config, self._target, self._dtype, self._question = config, target, dtype, question
        self._folder, self._progress = folder, progress
        self._stack = contextlib.ExitStack()
        self._running: Running | None = None
        self._up: Setting | None = None
        self.last: Setting | None = None
        """Of the latest trial, unless that failed: whose server is up, if the trial did not come from its file."""
        self.loads = 0
        """Taken by all trials so far, those from files included."""
        server = config.model_dump(mode="json", exclude={"port", "patience", "concurrency"})
        # Whatever could change a figure: a trial that was asked anything else is another one.
        self._asked = {
            "target": target.model_digest, "server": server, "dtype": dtype, "version": version,
            "prompts": [prompt.ids for prompt in question.prompts], "concurrencies": list(question.concurrencies),
            "rounds": question.rounds, "max_new_tokens": question.max_new_tokens,
        }  # fmt: skip

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server that is up."""
        self._running = self._up = None
        self._stack.close()

    def take(self, setting: Setting, enough: Callable[[Blocks], bool], part: str = "search") -> Trial:
        """Measure a setting until `enough` or all rungs are done. `part`: where in the search; each has its own trials.

        A server that does not start, dies or hangs is a trial that failed.
        """
        path = self._path(setting, part)
        trial = self._read(path, setting)
        if trial is None:
            trial = self._measure(setting, enough, part, path)
        self.loads += trial.loads
        self.last = setting if trial.failed is None else None
        return trial

    def forget(self, setting: Setting, part: str = "search") -> None:
        """Have a trial made again next time."""
        self._path(setting, part).unlink(missing_ok=True)

    def _path(self, setting: Setting, part: str) -> Path:
        return self._folder / f"{digest_json([self._asked, setting.to_json(), part])[:16]}.json"

    def _read(self, path: Path, setting: Setting) -> Trial | None:
        if not path.exists():
            return None
        said = read_json(path)
        if said["deadline"] is not None and said["deadline"] < self._question.seconds:
            return None  # it may have more time now
        blocks = {int(at): [Block.from_json(one) for one in many] for at, many in said["blocks"].items()}
        rest = (said[key] for key in ("failed", "loads", "start_seconds", "seconds", "served"))
        return Trial(setting, blocks, *rest)

    def _measure(self, setting: Setting, enough: Callable[[Blocks], bool], part: str, path: Path) -> Trial:
        began, loads, start = time.monotonic(), 0, None
        blocks: dict[int, list[Block]] = {}
        served: dict[str, Any] = {}
        failed, over = None, None
        self._progress.milestone(f"{part}: {setting.name}")
        try:
            with deadline(self._question.seconds):
                if self._up != setting:
                    loads = 1
                    start, served = self._load(setting)
                assert self._running is not None
                self._fill(self._running.endpoint.url, blocks, enough)
        except (UserError, ServerDied) as error:
            failed = self._why(error, path)
            over = self._question.seconds if isinstance(error, TooLongError) else None
            self.close()
        seconds = round(time.monotonic() - began, 3)
        record = {
            "setting": setting.to_json(), "part": part, "failed": failed, "deadline": over, "loads": loads,
            "start_seconds": start, "seconds": seconds, "served": served,
            "blocks": {} if failed else {at: [one.to_json() for one in many] for at, many in blocks.items()},
        }  # fmt: skip
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
        return Trial(setting, {} if failed else blocks, failed, loads, start, seconds, served)

    def _load(self, setting: Setting) -> tuple[float, dict[str, Any]]:
        """A server of this setting in place of the one that is up; seconds of its start, and what it says of itself."""
        self.close()
        place = self._folder / "server"
        self._running = self._stack.enter_context(
            started(setting.apply(self._config), self._target.folder, self._dtype, place, self._progress, capture=False)
        )
        self._up = setting
        url = self._running.endpoint.url
        for concurrency in self._question.concurrencies:
            measure.warm_up(self._asker(url), self._question.prompts, self._question.load(concurrency))
        return self._running.seconds["start"], _settings(url)

    def _asker(self, url: str) -> measure.SGLang:
        return measure.SGLang(url, self._target.eos_token_ids, self._target.vocab_size)

    def _fill(self, url: str, blocks: dict[int, list[Block]], enough: Callable[[Blocks], bool]) -> None:
        question, server = self._question, self._asker(url)
        asked = {concurrency: baseline.few(question.prompts, concurrency) for concurrency in question.concurrencies}
        self._progress.total(RUNGS[-1] * question.rounds * sum(map(len, asked.values())), "requests")
        for rung in RUNGS:
            for concurrency, prompts in asked.items():
                there = blocks.setdefault(concurrency, [])
                while len(there) < rung * question.rounds:
                    there.append(measure.block(server, prompts, question.load(concurrency), self._progress))
            if enough(blocks):
                return

    def _why(self, error: Exception, path: Path) -> str:
        """Why a trial failed; its log is put beside its file."""
        running, log = self._running, self._folder / "server" / "log.txt"
        text = str(error)
        if isinstance(error, TooLongError):
            text += ", while it was measured" if running else ", while the server started"
        elif running is not None and _ends(running):
            text = f"the server ended while it was measured: {running.why(self._config.python)}"
        if log.exists():
            shutil.copy(log, path.with_suffix(".log.txt"))
        return text.partition("; log: ")[0]


def _settings(url: str) -> dict[str, Any]:
    """What a server says of the settings that are searched; nothing where it does not."""
    for path in ("/server_info", "/get_server_info"):
        with contextlib.suppress(OSError, ValueError):
            said = info.ask(url, path)
            return {name: said[name] for name in SAID if name in said}
    return {}


def _ends(running: Running) -> bool:
    """Whether a server that broke a connection is about to end; its requests see that before its keeper does."""
    until = time.monotonic() + ENDING_SECONDS
    while running.alive() and time.monotonic() < until:
        time.sleep(0.05)
    return not running.alive()
