"""What tests of the capture plugin share."""

import time
from pathlib import Path


def wait_for(path: Path, seconds: float = 10.0) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, (
            f"{path} did not come; there are {sorted(p.name for p in path.parent.iterdir())}"
        )
        time.sleep(0.005)
