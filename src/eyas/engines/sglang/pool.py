"""Work for several servers at once: one queue, threads, results as they come."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from eyas.engines.sglang.http import Connection, ServerDied, Stopped

J = TypeVar("J")
R = TypeVar("R")
WAIT_SECONDS = 0.1
"""Room may also come from what the caller does, of which nobody tells."""


def always(server: int, job: object, idle: bool) -> bool:
    """Admits every job."""
    return True


def nothing(server: int, job: object, result: object) -> None:
    """Keeps no account of finished jobs."""


def fan_out(
    urls: Sequence[str],
    jobs: Iterable[J],
    work: Callable[[Connection, int, J], R],
    *,
    concurrency: int,
    admit: Callable[[int, J, bool], bool] = always,
    done: Callable[[int, J, R | None], None] = nothing,
) -> Generator[R, None, None]:
    """`work(connection, number of the server, job)` for every job, in order of completion.

    `concurrency`: most jobs at once on each server. `admit(server, job, idle)`: may it start now (`idle`: nothing else
    runs on that server)? `done(server, job, result)` follows each admitted job, result None where there is none. Both
    are called one at a time. Jobs of a server that died go to the others; with none left ServerDied is raised. Any
    other error of `work` ends it all and is raised here; requests under way are given up, no other is sent.
    """
    pool = _Pool(urls, iter(jobs), work, concurrency, admit, done)
    try:
        yield from pool.results()
    finally:
        pool.stop()


@dataclass
class _Server:
    number: int
    url: str
    running: int = 0
    dead: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Ended:
    """A thread has ended."""


class _Pool(Generic[J, R]):
    def __init__(
        self,
        urls: Sequence[str],
        jobs: Iterator[J],
        work: Callable[[Connection, int, J], R],
        concurrency: int,
        admit: Callable[[int, J, bool], bool],
        done: Callable[[int, J, R | None], None],
    ) -> None:
        self._jobs, self._work, self._admit, self._done = jobs, work, admit, done
        self._waiting: deque[J] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._results: queue.SimpleQueue[R | _Failed | _Ended] = queue.SimpleQueue()
        self._servers = [_Server(number, url) for number, url in enumerate(urls)]
        self._connections = [(server, Connection(server.url)) for server in self._servers for _ in range(concurrency)]
        self._threads = [threading.Thread(target=self._loop, args=pair, daemon=True) for pair in self._connections]

    def results(self) -> Iterator[R]:
        for thread in self._threads:
            thread.start()
        left = len(self._threads)
        while left:
            result = self._results.get()
            if isinstance(result, _Ended):
                left -= 1
            elif isinstance(result, _Failed):
                raise result.error
            else:
                yield result

    def stop(self) -> None:
        self._halt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=5.0)

    def _halt(self) -> None:
        """Start no more jobs, and end those that run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for _, connection in self._connections:
            connection.abort()

    def _loop(self, server: _Server, connection: Connection) -> None:
        try:
            while (job := self._take(server)) is not None:
                result = None
                try:
                    result = self._work(connection, server.number, job[0])
                    self._results.put(result)
                except ServerDied:
                    self._bury(server, job[0])
                finally:
                    self._release(server, job[0], result)
        except Stopped:
            pass
        except BaseException as error:
            self._results.put(_Failed(error))
            self._halt()  # at once: whoever takes the results may be busy
        finally:
            connection.close()
            self._results.put(_Ended())

    def _take(self, server: _Server) -> tuple[J] | None:
        """The next job for a server, as soon as it may start; None: there will be none."""
        # One thread of each server waits for its turn, the others for that one: a change wakes few of them.
        with server.turn, self._changed:
            while not self._stopped and not server.dead:
                if not self._waiting:
                    self._waiting.extend(self._more())
                if self._waiting:
                    job = self._waiting[0]
                    if self._admit(server.number, job, server.running == 0):
                        server.running += 1
                        return (self._waiting.popleft(),)
                elif not any(other.running for other in self._servers):
                    self._changed.notify_all()
                    return None
                self._changed.wait(WAIT_SECONDS)
            return None

    def _more(self) -> Iterator[J]:
        for job in self._jobs:
            yield job
            return

    def _bury(self, server: _Server, job: J) -> None:
        with self._changed:
            server.dead = True
            self._waiting.append(job)
            if all(other.dead for other in self._servers):
                raise ServerDied(", ".join(other.url for other in self._servers) + ": no server answers any more")

    def _release(self, server: _Server, job: J, result: R | None) -> None:
        with self._changed:
            server.running -= 1
            self._done(server.number, job, result)
            self._changed.notify_all()
