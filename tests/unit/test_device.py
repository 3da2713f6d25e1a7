"""Threads follow affinity and a container's quota."""

import os

from eyas.engines.device import usable_cores


def test_a_quota_limits_the_threads(tmp_path):
    cores = len(os.sched_getaffinity(0))
    for text, wanted in [("max 100000", cores), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", cores)]:
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cores(tmp_path / "cpu.max") == wanted
    assert usable_cores(tmp_path / "absent") == cores
