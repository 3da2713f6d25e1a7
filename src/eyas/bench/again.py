"""The again step: the plain server loaded once more after the drafted one, and measured again (A-B-A).

Where one device holds one server at a time, the baseline and the draft are measured minutes or hours apart. What the
machine did in between would pass for a speed-up; a second baseline behind the draft shows it.
"""

from pathlib import Path
from typing import Any

from eyas.bench import baseline, measure
from eyas.config import Decode
from eyas.engines import target as targets
from eyas.engines.sglang import client
from eyas.engines.sglang.server import endpoints
from eyas.progress import Progress
from eyas.spec import StepSpec
from eyas.store.store import FeatureStore


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry; leases `plain`. `bench`: the rows against both baselines together. `drift`: for each concurrency how
    many times as fast the second baseline is as the first, greedy, on the first workload."""
    target = targets.read(spec.inputs["target"])
    store = FeatureStore.open(spec.inputs["capture"] / "heldout", target=target)
    before = baseline.read_blocks(spec.inputs["baseline"])
    drafted = baseline.read_blocks(spec.inputs["decode"], baseline.DRAFTED)
    with client.leased():
        url = endpoints(spec.services["plain"])[0].url
        after = baseline.take(url, spec, store, target, None, out, progress)
    both = {figure: before[figure] + blocks for figure, blocks in after.items()}
    first, _, heat = next(iter(after))
    return {
        "bench": baseline.rows(both, drafted, spec.section(Decode)),
        "drift": {
            str(figure[1]): measure.ratio(before[figure], blocks)
            for figure, blocks in after.items()
            if (figure[0], figure[2]) == (first, heat)
        },
    }
