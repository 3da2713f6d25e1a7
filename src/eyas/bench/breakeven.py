"""What a draft must reach to pay on this server, known before any is trained (`bench.break_even`).

A round costs what it costs, whatever the draft is worth: so a draft of random weights, of the shape that training will
give, is served and timed beside the baseline. It takes a server load; a run with a pilot learns the same from the
pilot's draft, and needs none.
"""

from pathlib import Path
from typing import Any

from eyas.bench import baseline, cost
from eyas.config import Decode, Pilot
from eyas.engines import target as targets
from eyas.engines.sglang import client
from eyas.engines.sglang.server import endpoints
from eyas.errors import UserError
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases the server with the random draft. Writes drafted-*.json.

    Raises UserError: no draft of these many tokens can pay, and the run file requires that one can.
    """
    target, decode = targets.read(spec.inputs["target"]), spec.section(Decode)
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    with client.leased():
        url = endpoints(spec.services["drafted"])[0].url
        drafted = baseline.take(url, spec, store, target, decode.draft_tokens, out, progress)
    rows = baseline.rows(baseline.read_blocks(spec.inputs["baseline"]), drafted, decode)
    found = [
        {key: row[key] for key in ("workload", "concurrency", "temperature", "round_seconds", "token_seconds")}
        | {"break_even": cost.break_even(row)}
        for row in rows
    ]
    needed = [row["break_even"] for row in found if row["break_even"] is not None]
    if spec.section(Pilot).require and needed and min(needed) > decode.draft_tokens + 1:
        raise UserError(
            f"a draft of {decode.draft_tokens} tokens a step cannot pay on this server: it would have to reach "
            f"{min(needed):.2f} tokens a step, and {decode.draft_tokens + 1} is all there is. Look for what makes a "
            "round slow (CUDA graphs, attention backend); to train all the same set pilot.require=false"
        )
    return {"rows": found}
