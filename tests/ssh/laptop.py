"""The laptop of the tests: `eyas …` as typed, whose runs are toy steps.

EYAS_TOYS holds their options, EYAS_HOLD another graph and for how many seconds its services outlive a failure.
"""

import os
import sys
from pathlib import Path

from eyas import cli
from eyas.hosts import remote, ssh


def _toys(python: str, root: str, name: str, options: list[str]) -> list[str]:
    return [
        python,
        str(Path(__file__).with_name("fartoy.py")),
        f"{root}/runs/{name}",
        os.environ["EYAS_TOYS"],
        *os.environ.get("EYAS_HOLD", "").split(),
    ]


remote._command = _toys
ssh.LONGEST_WAIT_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(cli.main())
