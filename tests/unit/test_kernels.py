"""The Triton kernels against what they stand for; on a processor by Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from eyas.draft import fused, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "size", "steps"), [(5, 8, 2, 16, 3), (3, 4, 4, 28, 1), (4, 9, 3, 64, 6)]
)
def test_merge_and_its_backward(rows, heads, groups, size, steps):
    torch.manual_seed(0)
    query, out, grad, first = (torch.randn(rows, heads, size, device=DEVICE) for _ in range(4))
    keys, values = (torch.randn(steps, rows, groups, size, device=DEVICE) for _ in range(2))
    log_sum = torch.randn(heads, rows, device=DEVICE)
    wanted = fused.merge(out, log_sum, query, keys, values, 0.3)
    torch.testing.assert_close(kernels.merge(out, log_sum, query, keys, values, 0.3), wanted)
    arguments = (grad, *wanted, query, keys, values, 0.3)
    theirs = fused.merge_backward(*arguments, first)
    torch.testing.assert_close(kernels.merge_backward(*arguments, first), theirs, rtol=1e-4, atol=1e-5)


def test_a_card_on_which_they_are_wrong_does_without(monkeypatch):
    assert kernels.usable.__wrapped__(torch.device(DEVICE))
    merge = kernels.merge
    monkeypatch.setattr(kernels, "merge", lambda out, *others: merge(2 * out, *others))
    assert not kernels.usable.__wrapped__(torch.device(DEVICE))
