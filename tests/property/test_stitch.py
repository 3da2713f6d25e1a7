"""Chunks of many requests, in any batches, come together as what each request was."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engines.sglang.capturefile import read
from eyas.engines.sglang.plugin.protocol import Orders, Wanted
from eyas.engines.sglang.plugin.staging import Staging
from eyas.engines.sglang.plugin.stitch import chunks
from plugged import wait_for

HIDDEN = 4


def states(request: int, token: int, width: int) -> list[float]:
    """Numbers that name request and token."""
    return [request * 1000.0 + token + i / 64 for i in range(width)]


@settings(max_examples=40)
@given(st.data())
def test_any_batching_gives_every_request_its_own_rows(data: st.DataObject) -> None:
    """Plain requests, cached prefixes of foreign ones, padding, chunks of any size, three requests a pass at most."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    plain = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    chunk = data.draw(st.integers(1, 16))
    names = [
        f"HEALTH_CHECK_{i}" if alone else Wanted(f"s{i}", n).rid
        for i, (n, alone) in enumerate(zip(lengths, plain, strict=True))
    ]
    done = [data.draw(st.integers(0, n - 1)) if alone else 0 for n, alone in zip(lengths, plain, strict=True)]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        staging = Staging(Orders(root, root, None, 1 << 20, 5.0), (1, 2, 3), HIDDEN, torch.float32, torch.device("cpu"))
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            open_ = [i for i in range(len(lengths)) if done[i] < lengths[i]]
            batch = data.draw(st.lists(st.sampled_from(open_), min_size=1, max_size=3, unique=True))
            counts = [min(data.draw(st.integers(1, chunk)), lengths[i] - done[i]) for i in batch]
            tokens = [(i, done[i] + k) for i, count in zip(batch, counts, strict=True) for k in range(count)]
            tokens += [(99, 99)] * data.draw(st.integers(0, 4))
            last = torch.tensor([states(i, t, HIDDEN) for i, t in tokens])
            aux = [last * -1, last * -2, last * -3]
            ids = torch.tensor([i * 1000 + t for i, t in tokens])
            for piece in chunks([names[i] for i in batch], [done[i] for i in batch], counts):
                packed = data.draw(st.booleans())
                staging.put(piece, ids, torch.cat(aux, -1) if packed else aux, last)
            last.fill_(7.0)  # As the next pass does with its buffers.
            for i, count in zip(batch, counts, strict=True):
                done[i] += count
        for i, (n, alone) in enumerate(zip(lengths, plain, strict=True)):
            if alone:
                continue
            wanted = Wanted(f"s{i}", n)
            wait_for(wanted.file(root))
            got = read(wanted.file(root), root)
            want = torch.tensor([states(i, t, HIDDEN) for t in range(n)])
            assert got.ids.tolist() == [i * 1000 + t for t in range(n)]
            assert torch.equal(got.last, want)
            assert torch.equal(got.aux, torch.cat([want * -1, want * -2, want * -3], -1))
        assert not list(root.glob("HEALTH*"))
