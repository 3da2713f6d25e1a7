"""The gate behind a pilot: a small run of everything says whether the full one can end well, before it costs hours.

It passes where the draft is served as predicted and without loss, and where its learning curve can reach the accept
length at which a draft begins to pay on this server. The extrapolation is meant to be generous: a draft is stopped here
only if even steady progress would not be enough.
"""

import math
from pathlib import Path
from typing import Any

from eyas.bench.parity import differs
from eyas.config import Decode, Pilot
from eyas.errors import UserError
from eyas.files import read_json
from eyas.progress import Progress
from eyas.spec import StepSpec

GENEROUS = 1.5
"""The gain of each doubling of the training tokens is taken to be this many times that of the pilot's last one."""
LEAST_GAIN = 0.05
"""And at least this, since a curve over few held-out answers is noisy."""
REMEDY = "look at the report; to go on all the same set pilot.require=false"


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry. Raises UserError where the pilot fails and the run file requires that it passes."""
    config = spec.section(Pilot)
    progress.milestone("weighing the pilot")
    replay, decode, train = (read_json(spec.inputs[name] / "result.json") for name in ("replay", "decode", "train"))
    rows = int(read_json(spec.inputs["prompts"] / "result.json")["train"])
    found = judge(replay, decode, train, rows / config.samples, spec.section(Decode).draft_tokens)
    if config.require and found["against"]:
        raise UserError(f"the pilot of {config.samples} samples failed: {' '.join(found['against'])} ({REMEDY})")
    return found


def judge(
    replay: dict[str, Any], decode: dict[str, Any], train: dict[str, Any], growth: float, draft_tokens: int
) -> dict[str, Any]:
    """What speaks against the full run, which trains on `growth` times as many samples: `against`, empty if nothing.

    Also `accept_length` of the pilot's draft, `reach`: what the full run's may come to at best, and `break_even`: what
    it must reach with one request at a time; null where the server's costs were not measured.
    """
    against = []
    if decode["lossless"] is not True:
        against.append(
            f"{decode['mismatches']} of {decode['prompts']} answers with the draft are not the target's own."
        )
    against += differs(decode)
    reached = float(replay["accept_length"])
    reach = min(draft_tokens + 1.0, extrapolate(train["curve"], reached, growth))
    needed = break_even(decode.get("bench") or [])
    if needed is not None and reach < needed:
        against.append(
            f"A draft must reach {needed:.2f} tokens a step to pay on this server; the pilot's reaches {reached:.2f}, "
            f"and {growth:.0f} times as many samples bring it to {reach:.2f} at best."
        )
    return {"against": against, "accept_length": reached, "reach": reach, "break_even": needed, "growth": growth}


def extrapolate(curve: list[dict[str, float]], reached: float, growth: float) -> float:
    """The accept length after `growth` times the tokens, at most: what the curve's end gains a doubling, generously."""
    points = [point for point in curve if point["tokens"] > 0]
    gain = 0.0
    if len(points) >= 2:
        half, last = points[len(points) // 2 - 1], points[-1]
        doublings = math.log2(last["tokens"] / half["tokens"])
        gain = (last["accept_length"] - half["accept_length"]) / doublings if doublings else 0.0
    return reached + max(GENEROUS * gain, LEAST_GAIN) * math.log2(max(growth, 1.0))


def break_even(bench: list[dict[str, Any]]) -> float | None:
    """The accept length at which a draft pays with the fewest requests at a time, from measured bench rows."""
    costs = [row for row in bench if row.get("round_seconds") and row.get("token_seconds")]
    if not costs:
        return None
    first = min(costs, key=lambda row: (row["temperature"], row["concurrency"]))
    return float(first["round_seconds"] / first["token_seconds"])
