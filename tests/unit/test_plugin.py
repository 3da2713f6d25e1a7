"""The capture plugin without a server: what it refuses, what it survives, what it says."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eyas.engines.sglang.plugin.staging as stagings
from eyas.engines.sglang.capturefile import read
from eyas.engines.sglang.plugin.hooks import Plugin, collect, obstacle
from eyas.engines.sglang.plugin.layout import CaptureFile
from eyas.engines.sglang.plugin.protocol import VARIABLE, Orders, Wanted
from eyas.engines.sglang.plugin.staging import Staging
from eyas.engines.sglang.plugin.stitch import Chunk
from eyas.engines.sglang.ship import ship
from eyas.errors import UserError
from plugged import wait_for

HIDDEN = 8
ORDERS = Orders(Path("root"), Path("status"), None, 1 << 20, 3.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def staging(root: Path, hold: float = 3.0) -> Staging:
    return Staging(replace(ORDERS, root=root, hold_seconds=hold), (2, 4, 5), HIDDEN, torch.float32, torch.device("cpu"))


def put(to: Staging, wanted: Wanted, prefix: int, count: int, seed: int = 0) -> torch.Tensor:
    """One chunk; its last states."""
    last = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    to.put(Chunk(wanted, 0, prefix, count), torch.arange(prefix, prefix + count), [last, last + 1, last + 2], last)
    return last


def reason(root: Path, wanted: Wanted) -> str:
    wait_for(wanted.failed(root))
    assert not wanted.file(root).exists()
    assert not list(root.glob(f".{wanted.name}.*")), "something half-written was left"
    return wanted.failed(root).read_text()


def test_a_request_in_two_chunks(root: Path) -> None:
    wanted, to = Wanted("a", 10), staging(root)
    first = put(to, wanted, 0, 6)
    assert wanted.partial(root).exists()
    assert not wanted.file(root).exists()
    second = put(to, wanted, 6, 4, seed=1)
    wait_for(wanted.file(root))
    got = read(wanted.file(root), root)
    assert got.layers == (2, 4, 5)
    assert torch.equal(got.last, torch.cat([first, second]))
    assert wanted.file(root).stat().st_mode & 0o777 == 0o600


def test_a_prefix_from_the_cache_is_refused(root: Path) -> None:
    wanted, to = Wanted("a", 10), staging(root)
    put(to, wanted, 6, 4)
    assert "first 6 tokens came from the prefix cache" in reason(root, wanted)


def test_missing_rows_are_refused_and_later_chunks_do_not_hide_why(root: Path) -> None:
    wanted, to = Wanted("a", 12), staging(root)
    put(to, wanted, 0, 4)
    put(to, wanted, 6, 2)
    put(to, wanted, 8, 4)
    assert "rows 4 to 6 never came" in reason(root, wanted)


def test_more_rows_than_tokens_are_refused(root: Path) -> None:
    wanted, to = Wanted("a", 3), staging(root)
    put(to, wanted, 0, 4)
    assert "4 rows came for a request of 3 tokens" in reason(root, wanted)


def test_a_retracted_request_starts_anew(root: Path) -> None:
    wanted, to = Wanted("a", 6), staging(root)
    put(to, wanted, 0, 4)
    put(to, wanted, 0, 4, seed=1)
    put(to, wanted, 4, 2, seed=2)
    wait_for(wanted.file(root))
    assert read(wanted.file(root), root).ids.tolist() == list(range(6))


def test_a_failed_request_can_be_sent_again(root: Path) -> None:
    wanted, to = Wanted("a", 6), staging(root)
    put(to, wanted, 3, 3)
    assert reason(root, wanted)
    last = put(to, wanted, 0, 6)
    wait_for(wanted.file(root))
    assert not wanted.failed(root).exists()
    assert torch.equal(read(wanted.file(root), root).last, last)


def test_tokens_behind_the_prompt_are_not_captured(root: Path) -> None:
    wanted, to = Wanted("a", 4), staging(root)
    put(to, wanted, 0, 4)
    wait_for(wanted.file(root))
    put(to, wanted, 4, 1)
    assert [path.name for path in root.iterdir()] == ["a.safetensors"]


def test_every_rank_writes_its_own(root: Path) -> None:
    wanted = Wanted("a", 4, every_rank=True)
    orders = replace(ORDERS, root=root)
    for rank in (0, 1):
        put(Staging(orders, (2, 4, 5), HIDDEN, torch.float32, torch.device("cpu"), rank), wanted, 0, 4)
    for rank in (0, 1):
        wait_for(wanted.file(root, rank))
    assert wanted.file(root, 1).name == "a.rank1.safetensors"


def test_an_aborted_request_is_forgotten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = staging(root)
    put(to, Wanted("old", 10), 0, 5)
    monkeypatch.setattr(stagings, "FORGET_SECONDS", -1.0)
    put(to, Wanted("new", 5), 0, 5)
    wait_for(Wanted("new", 5).file(root))
    assert sorted(path.name for path in root.iterdir()) == ["new.safetensors"]


def test_a_full_disk_holds_and_then_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, real = [True], os.pwrite

    def pwrite(*args: Any) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    wanted, to = Wanted("a", 4), staging(root, hold=20.0)
    put(to, wanted, 0, 4)
    assert wanted.partial(root).exists()
    assert not wanted.file(root).exists()
    full[0] = False
    wait_for(wanted.file(root))


def test_a_disk_that_stays_full_fails_the_request_not_the_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(stagings, "BUFFER_BYTES", 1 << 12)
    to = Staging(Orders(root, root, None, 1, 0.3), (2, 4, 5), HIDDEN, torch.float32, torch.device("cpu"))
    for name in "abcde":  # Two buffers: the third finds none, the later ones do not wait again.
        put(to, Wanted(name, 4), 0, 4)
    for name in "abcde":
        assert "No space left" in (why := reason(root, Wanted(name, 4))) or "no way into a file" in why


@pytest.fixture
def small_memory(tmpfs: Callable[[str], Path]) -> Path:
    """Memory-backed storage of 64 KiB, as /dev/shm is in some containers, only smaller."""
    return tmpfs("64k")


def test_real_storage_that_is_full_holds_until_there_is_room(small_memory: Path) -> None:
    """Each capture takes 31 KiB: the third waits until one is deleted, and then is whole."""
    to = staging(small_memory, hold=20.0)
    wanted, states = [Wanted(name, 240) for name in "abc"], []
    for seed, one in enumerate(wanted):
        states.append(put(to, one, 0, 240, seed=seed))
        if one is not wanted[2]:
            wait_for(one.file(small_memory))
    assert not wanted[2].file(small_memory).exists()
    wanted[0].file(small_memory).unlink()
    wait_for(wanted[2].file(small_memory))
    for one, last in zip(wanted[1:], states[1:], strict=True):
        assert torch.equal(read(one.file(small_memory), small_memory).last, last)


def test_real_storage_that_stays_full_fails_the_request(small_memory: Path) -> None:
    to = staging(small_memory, hold=0.3)
    for name in "abc":
        put(to, Wanted(name, 240), 0, 240)
        if name != "c":
            wait_for(Wanted(name, 240).file(small_memory))
    wait_for(Wanted("c", 240).failed(small_memory))
    assert Wanted("c", 240).failed(small_memory).read_text() == "", "there is no room for the reason"
    assert len(list(small_memory.glob("*.safetensors"))) == 2


def test_more_rows_than_a_buffer_holds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagings, "BUFFER_BYTES", 1 << 10)
    wanted = Wanted("a", 100)
    last = put(staging(root), wanted, 0, 100)
    wait_for(wanted.file(root))
    assert torch.equal(read(wanted.file(root), root).last, last)


# What a client refuses.


@pytest.fixture
def captured(root: Path) -> Path:
    put(staging(root), Wanted("a", 4), 0, 4)
    wait_for(root / "a.safetensors")
    return root / "a.safetensors"


def test_a_file_cut_short_is_refused(captured: Path) -> None:
    captured.write_bytes(captured.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"a\.safetensors: cut short or damaged"):
        read(captured, captured.parent)


def test_a_file_outside_the_root_is_refused(captured: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="outside of the capture root"):
        read(tmp_path / "other" / ".." / "root" / "a.safetensors", tmp_path / "other")


def test_a_link_out_of_the_root_is_refused(captured: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.safetensors").symlink_to(captured)
    with pytest.raises(UserError, match="outside of the capture root"):
        read(tmp_path / "other" / "b.safetensors", tmp_path / "other")


def test_a_foreign_file_is_refused(root: Path) -> None:
    from safetensors.torch import save_file

    save_file({"ids": torch.zeros(3)}, root / "b.safetensors")
    with pytest.raises(UserError, match="not a capture file"):
        read(root / "b.safetensors", root)
    with pytest.raises(UserError, match="cannot read"):
        read(root / "none.safetensors", root)


@pytest.mark.parametrize(
    "rid", ["HEALTH_CHECK_1", "abc", "eyas:c:0:a", "eyas:c:5:../a", "eyas:c:5:a/b", "eyas:x:5:a", ""]
)
def test_other_requests_are_not_ours(rid: str) -> None:
    assert Wanted.of(rid) is None


def test_request_ids_come_back() -> None:
    for wanted in (Wanted("a-b_1", 77), Wanted("x", 1, every_rank=True)):
        assert Wanted.of(wanted.rid) == wanted


# The hooks, called as SGLang calls them.


def runner(**changes: Any) -> Any:
    args = {"speculative_algorithm": None, "pp_size": 1, "enable_dp_attention": False} | changes
    return SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(**args))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()

    def set_eagle3_layers_to_capture(self, ids: list[int] | None) -> None:
        self.model.layers_to_capture = [2, 4, 5]


def batch(rids: list[str], prefixes: list[int], counts: list[int]) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        rids=rids,
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens_cpu=counts,
        input_ids=torch.arange(sum(counts)),
    )


@pytest.fixture
def plugin(root: Path) -> Plugin:
    made = Plugin(replace(ORDERS, root=root))
    made.staging = staging(root)
    return made


def test_what_cannot_be_captured_is_said() -> None:
    assert obstacle(runner()) == ""
    assert "speculation is on" in obstacle(runner(speculative_algorithm="EAGLE3"))
    assert "pipeline" in obstacle(runner(pp_size=2))
    assert "dp-attention" in obstacle(runner(enable_dp_attention=True))
    assert "does not collect" in collect(torch.nn.Linear(1, 1), (1, 2, 3))


def test_layers_are_set_as_hidden_states_indices() -> None:
    model = Model()
    assert collect(model, (3, 6, 7)) == ""
    assert model.model.layers_to_capture == [3, 6, 7]


def test_classes_that_flag_their_layers() -> None:
    model = Model()
    model.model.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(8))
    for number in (2, 4, 5):
        model.model.layers[number]._is_layer_to_capture = True
    assert collect(model, (3, 4, 7)) == ""
    flagged = [i for i, layer in enumerate(model.model.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert flagged == [3, 4, 7]


def test_an_unknown_sglang_serves_and_says_why_it_cannot_capture(tmp_path: Path) -> None:
    plugin = Plugin(replace(ORDERS, status=tmp_path))
    plugin.before_backends(runner())
    assert "unlike those that the plugin knows" in json.loads((tmp_path / "rank0.json").read_text())["problem"]


def forward_of(plugin: Plugin, last: torch.Tensor, aux: Any) -> Callable[..., str]:
    """A ModelRunner.forward that reaches the logits."""

    def forward(runner: Any, batch: Any) -> str:
        return str(plugin.around_logits(lambda *args: "logits", None, batch.input_ids, last, None, None, aux))

    return forward


def test_a_pass_through_both_hooks(plugin: Plugin, root: Path) -> None:
    last = torch.randn(8, HIDDEN)  # Two rows of padding.
    wanted = Wanted("a", 4)
    got = plugin.around_forward(
        forward_of(plugin, last, [last, last, last]), runner(), batch(["plain", wanted.rid], [0, 0], [2, 4])
    )
    assert got == "logits"
    wait_for(wanted.file(root))
    assert torch.equal(read(wanted.file(root), root).last, last[2:6])
    assert read(wanted.file(root), root).ids.tolist() == [2, 3, 4, 5]


def test_a_graph_that_fires_no_hook_is_found(plugin: Plugin, root: Path) -> None:
    wanted = Wanted("a", 4)
    plugin.around_forward(lambda runner, batch: "replayed", runner(), batch([wanted.rid], [0], [4]))
    assert "went by without its hook" in reason(root, wanted)


def test_fewer_rows_than_tokens(plugin: Plugin, root: Path) -> None:
    wanted, last = Wanted("a", 4), torch.randn(3, HIDDEN)
    plugin.around_forward(forward_of(plugin, last, [last] * 3), runner(), batch([wanted.rid], [0], [4]))
    assert "fewer rows" in reason(root, wanted)


def test_a_model_that_collects_too_few(plugin: Plugin, root: Path) -> None:
    wanted, last = Wanted("a", 4), torch.randn(4, HIDDEN)
    plugin.around_forward(forward_of(plugin, last, [last] * 2), runner(), batch([wanted.rid], [0], [4]))
    assert "gave 2 collected states, not three" in reason(root, wanted)


def test_states_of_another_width_or_dtype_are_refused(plugin: Plugin, root: Path) -> None:
    for name, last in (("narrow", torch.randn(4, HIDDEN // 2)), ("coarse", torch.randn(4, HIDDEN).bfloat16())):
        wanted = Wanted(name, 4)
        plugin.around_forward(forward_of(plugin, last, [last] * 3), runner(), batch([wanted.rid], [0], [4]))
        assert "unlike what the model declares" in reason(root, wanted)


def test_a_fault_of_the_plugin_does_not_reach_the_server(
    plugin: Plugin, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> None:
        raise RuntimeError("out of memory")

    wanted, last = Wanted("a", 4), torch.randn(4, HIDDEN)
    with monkeypatch.context() as patch:
        patch.setattr(plugin.staging, "_copy", out_of_memory)
        got = plugin.around_forward(forward_of(plugin, last, [last] * 3), runner(), batch([wanted.rid], [0], [4]))
    assert got == "logits"
    assert "out of memory" in reason(root, wanted)
    plugin.around_forward(forward_of(plugin, last, [last] * 3), runner(), batch([wanted.rid], [0], [4]))
    wait_for(wanted.file(root))


def test_a_status_that_cannot_be_written_only_ends_capture(tmp_path: Path) -> None:
    plugin = Plugin(replace(ORDERS, status=tmp_path / "gone"))
    plugin.before_backends(runner())
    assert plugin.staging is None


def test_the_draft_worker_is_left_alone(plugin: Plugin, root: Path) -> None:
    drafting = SimpleNamespace(is_draft_worker=True)
    plugin.around_forward(lambda runner, batch: "ok", drafting, batch([Wanted("a", 4).rid], [0], [4]))
    assert not list(root.iterdir())


# Shipping.


def test_a_shipped_plugin_is_found_by_another_interpreter(tmp_path: Path) -> None:
    folder = ship(tmp_path / "plugin")
    code = (
        "from importlib.metadata import entry_points\n"
        "point, = entry_points(group='sglang.srt.plugins')\n"
        "assert point.name == 'eyas'\n"
        "point.load()()\n"  # No orders: nothing is registered, SGLang is not asked for.
        "import eyas; print(eyas.__file__)\n"
    )
    env = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    assert VARIABLE not in env
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(folder / "eyas" / "__init__.py")
    assert ship(folder) == folder, "can be done again"


def test_a_root_that_vanishes_ends_no_writer(tmp_path: Path) -> None:
    """The file is given its name before it is closed: where that fails, it can still be given up."""
    (tmp_path / "root").mkdir()
    wanted = Wanted("gone", 2)
    file = CaptureFile(wanted.partial(tmp_path / "root"), wanted, (1, 2, 3), 4, torch.float32)
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(FileNotFoundError):
        file.finish(wanted.file(tmp_path / "root"))
    file.abandon()
