"""The runner of the tests on the far side: toy steps instead of a run file's. `fartoy.py RUN_FOLDER CONFIG`."""

import os
import runpy
import sys
from pathlib import Path

tests = Path(__file__).parents[1]
sys.path.insert(0, str(tests))
os.environ["PYTHONPATH"] = f"{os.environ['PYTHONPATH']}:{tests}"
runpy.run_path(str(tests / "toyrun.py"), run_name="__main__")
