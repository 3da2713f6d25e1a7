"""After a failure: healthy services are kept up for a while, so that a fix costs no other load."""

import time
from collections.abc import Callable

from eyas.run.service import Service
from eyas.run.view import Watcher

TICK_SECONDS = 0.1


def hold(services: list[Service], watcher: Watcher, seconds: float, over: Callable[[], bool]) -> None:
    """Wait until the time is over, `over` says so, or none of the services lives any more; say what is left of it."""
    until = time.time() + seconds
    names, clock = " and ".join(service.name for service in services), time.strftime("%H:%M", time.localtime(until))
    watcher.note(
        f"{names} stays up until {clock}: mend what failed and run the same command again, in another terminal, "
        "and it need not load again; Ctrl-C ends it now"
    )
    while time.time() < until and not over() and any(one.child and one.child.running() for one in services):
        watcher.waits(f"{names} held, {max(0, int(until - time.time()))} s left")
        watcher.tick()
        time.sleep(TICK_SECONDS)
