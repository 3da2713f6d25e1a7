"""Does SGLang's own loader take every tensor of a draft? Asked of the user's interpreter; no server, no weights."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from eyas.engines.sglang.checks import Check
from eyas.errors import UserError

NAME = "SGLang's own loader"
SCRIPT = Path(__file__).with_name("loaderprobe")
SECONDS = 300.0


class Loader:
    """The question, asked at once and answered later, since importing SGLang alone takes ten seconds or more.

    Raises UserError: there is no such interpreter.
    """

    def __init__(self, draft: Path, python: str, env: Mapping[str, str] | None = None) -> None:
        command = [python, str(SCRIPT), str(draft), str(SCRIPT.parent / "cpu")]
        self._said = ""
        try:
            self._process = subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
            )
        except OSError as error:
            raise UserError(
                f"{python}: cannot be run ({error.strerror}): name the interpreter that has SGLang"
            ) from error

    def check(self) -> Check:
        """The answer. `passed` is None where this version of SGLang cannot be asked."""
        try:
            self._said, _ = self._process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            self._said = f"no answer within {SECONDS:.0f} s"
        lines = self._said.strip().splitlines() or ["it said nothing"]
        try:
            found = json.loads(lines[-1])
            version, ignored, refused, unfilled = (found[k] for k in ("sglang", "ignored", "refused", "unfilled"))
        except (ValueError, TypeError, KeyError):
            return Check(NAME, None, f"cannot be asked: {lines[-1]}")
        wrong = [f"it ignores {', '.join(ignored)}"] if ignored else []
        wrong += [f"it refuses {name} ({why})" for name, why in refused.items()]
        wrong += [f"it leaves {', '.join(unfilled)} uninitialised"] if unfilled else []
        remedy = "export the draft again, under the names that SGLang's class loads"
        if wrong:
            return Check(NAME, False, f"SGLang {version}: {'; '.join(wrong)}", remedy)
        return Check(NAME, True, f"SGLang {version} takes every tensor and fills every parameter", remedy)

    def stop(self) -> None:
        """End the question, if it still runs."""
        self._process.kill()
        self._process.wait()
