"""The search space: what is left out, and why."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.tune import machine, probe
from eyas.bench.tune.machine import Machine
from eyas.bench.tune.space import FLAGS, Factor, facts, grid_loads, nccl_candidates, space
from eyas.config import Server, Tune
from eyas.errors import UserError

H200 = Machine(
    "cuda", "0.5.17", {**dict.fromkeys(FLAGS, ()), "attention-backend": ("fa3", "flashinfer", "triton", "flashmla")},
    packages=frozenset({"flashinfer"}), gpus=2, gpu="NVIDIA H200", capability=(9, 0), links="nvlink",
)  # fmt: skip
CPU = dataclasses.replace(H200, device="cpu", gpus=0, capability=(0, 0), links="unknown")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "NCCL_PROTO", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)


def made(
    host: Machine, served: dict[str, Any] | None = None, nccl: Any = (), text: Any = None, **changed: Any
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Names of each factor's settings, and the reason for each one left out."""
    tune = Tune(**{name: changed.pop(name) for name in ("goal", "lossy", "options") if name in changed})
    known = facts(host, Server(**changed), tune, text or {}, served or {}, nccl)
    factors, left = space(known)
    assert not {factor.name for factor in factors} & {one.name for one in left}
    names = {factor.name: [setting.name for setting in factor.settings] for factor in factors}
    return names, {one.name: one.why for one in left}


def test_on_one_gpu_nothing_is_reduced() -> None:
    factors, left = made(H200)
    assert left["disable-custom-all-reduce"] == "one GPU has nothing to reduce"
    known = facts(H200, Server(), Tune(), {}, {})
    assert nccl_candidates(known)[0] == []
    assert factors["attention-backend"] == [f"attention-backend {name}" for name in ("fa3", "flashinfer", "triton")]
    assert factors["num-continuous-decode-steps"][0] == "num-continuous-decode-steps 4"


def test_what_the_default_server_does_anyway_is_not_tried() -> None:
    served: dict[str, Any] = {"attention_backend": "fa3", "disable_overlap_schedule": True}
    served |= {"cuda_graph_config": {"decode": {"max_bs": 256}}}
    factors, left = made(H200, served, goal="throughput@64")
    assert "attention-backend fa3" not in factors["attention-backend"]
    assert "off here by default" in left["disable-overlap-schedule"]
    assert "graphs reach 256 requests already" in left["cuda-graph-max-bs-decode"]
    assert "cuda-graph-max-bs" not in {*left, *factors}, "an old name where the new one is known"
    served = {"cuda_graph_config": {"decode": {"max_bs": None}}, "cuda_graph_max_bs_decode": 32}
    factors, _ = made(H200, served, goal="latency+throughput@64")
    assert factors["cuda-graph-max-bs-decode"] == ["cuda-graph-max-bs-decode 64"]
    assert factors["enable-mixed-chunk"] == ["enable-mixed-chunk"]


def test_what_somebody_chose_is_not_tried() -> None:
    args = {"decode-attention-backend": "fa3", "num-continuous-decode-steps": 2, "disable-cuda-graph": True}
    _, left = made(H200, args=args, goal="throughput@500")
    assert left["num-continuous-decode-steps"] == "server.args sets it"
    assert left["attention-backend"] == "decode-attention-backend is set, which decides it"
    assert left["cuda-graph-max-bs-decode"] == "disable-cuda-graph is set"


def test_what_changes_answers_must_be_asked_for_and_possible() -> None:
    assert "tune.lossy" in made(H200)[1]["kv-cache-dtype"]
    assert made(H200, lossy=True)[0]["kv-cache-dtype"] == ["kv-cache-dtype fp8_e4m3"]
    older = dataclasses.replace(H200, capability=(8, 0))
    assert made(older, lossy=True)[1]["kv-cache-dtype"] == "this card has no fp8"


def test_a_cpu_has_no_graphs_but_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.tune.space.usable_cores", lambda: 8)
    factors, left = made(CPU, args={"device": "cpu"})
    assert set(factors) == {"num-continuous-decode-steps", "disable-overlap-schedule", "OMP_NUM_THREADS"}
    assert factors["OMP_NUM_THREADS"] == ["OMP_NUM_THREADS=4"]
    assert "on a CPU" in left["cuda-graph-max-bs-decode"]
    assert left["attention-backend"] == "eyas sets it on a CPU"
    assert "no GPU" in nccl_candidates(facts(CPU, Server(args={"device": "cpu"}), Tune(), {}, {}))[1][0].why
    assert "sets it" in made(CPU, args={"device": "cpu"}, env={"OMP_NUM_THREADS": "3"})[1]["OMP_NUM_THREADS"]


def test_flags_that_this_sglang_lacks_or_ignores() -> None:
    flags = {name: one for name, one in H200.flags.items() if name != "enable-torch-compile"}
    host = dataclasses.replace(H200, flags=flags, unread=frozenset({"num-continuous-decode-steps"}))
    _, left = made(host)
    assert left["enable-torch-compile"] == "SGLang 0.5.17 does not know it"
    assert left["num-continuous-decode-steps"] == "SGLang 0.5.17 takes it, but nothing in it reads it"


def test_nccl_matters_where_the_custom_kernel_does_not_reduce() -> None:
    best = [{"NCCL_PROTO": "LL"}, {"NCCL_ALGO": "Tree"}]
    off = "disable-custom-all-reduce"
    assert made(H200, nccl=best, tp=2)[0][off] == [f"{off}, NCCL_PROTO=LL", f"{off}, NCCL_ALGO=Tree", off]
    assert made(H200, nccl=best, tp=2, args={off: True})[0][off] == ["NCCL_PROTO=LL", "NCCL_ALGO=Tree"]
    assert "won the stand-alone" in made(H200, tp=2, args={off: True})[1][off]


def test_nccl_candidates_follow_the_links() -> None:
    found, left = nccl_candidates(facts(H200, Server(tp=2, env={"NCCL_ALGO": "Ring"}), Tune(), {}, {}))
    assert {"NCCL_PROTO": "LL128"} in found
    assert not any(name in env for env in found for name in ("NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"))
    reasons = {one.name: one.why for one in left}
    assert reasons["NCCL_ALGO=Tree"] == "the environment sets NCCL_ALGO"
    assert "NVLink" in reasons["NCCL_P2P_DISABLE=1"]
    pcie = dataclasses.replace(H200, links="pcie")
    found, left = nccl_candidates(facts(pcie, Server(tp=2), Tune(), {}, {}))
    assert {"NCCL_P2P_DISABLE": "1"} in found
    assert [one.name for one in left] == ["NCCL_PROTO=LL128"]


def test_only_what_is_asked_for() -> None:
    factors, left = made(H200, options=["disable-overlap-schedule"])
    assert set(factors) == {"disable-overlap-schedule"}
    assert left["attention-backend"] == "not among tune.options"
    with pytest.raises(UserError, match=r"tune\.options: no option overlap; there are .*attention-backend"):
        made(H200, options=["overlap"])


def test_a_grid_is_every_combination() -> None:
    factors, _ = space(facts(H200, Server(), Tune(options=["attention-backend", "disable-overlap-schedule"]), {}, {}))
    assert grid_loads(factors) == 4 * 2
    assert grid_loads(list[Factor]()) == 1


def test_the_help_of_argparse() -> None:
    text = """\
usage: launch_server.py [-h] --model-path MODEL_PATH

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The path of the --weights.
  --attention-backend {triton,fa3}
                        Choose the kernels.
  --enable-mixed-chunk  Mix {prefill} and --decode.
"""
    assert machine.parse_help(text) == {
        "help": (), "model-path": (), "model": (), "attention-backend": ("triton", "fa3"), "enable-mixed-chunk": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "links"),
    [("NV18 NV18", "nvlink"), ("SYS SYS", "pcie"), ("NV4 PHB", "mixed"), ("", "unknown")],
)
def test_links_between_gpus(cells: str, links: str) -> None:
    if cells:
        one, other = cells.split()
        gpus = f"GPU0\t X \t{one}\tPIX\t0-15\nGPU1\t{other}\t X \tPIX\t0-15\n"
        text = f"\tGPU0\tGPU1\tNIC0\tCPU Affinity\n{gpus}NIC0\tPIX\tPIX\t X\n"
    else:
        text = "\tGPU0\nGPU0\t X \t0-15\n"
    assert machine.links(text) == links


def test_a_flag_that_is_only_declared_is_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(
        'parser.add_argument("--a-flag", default=ServerArgs.a_flag)\na_flag: int = 1\nif self.other_flag: ...\n'
    )
    (tmp_path / "sglang" / "srt" / "scheduler.py").write_text("steps = args.third_flag_too\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert probe.unread(["a-flag", "other-flag", "third-flag"]) == ["a-flag", "third-flag"]


def test_the_machine_as_the_servers_interpreter_sees_it(tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H200", "capability": [9, 0]}
    said: dict[str, Any] = {"version": "0.5.17", "packages": ["flashinfer"], "unread": ["x"], "gpus": [gpu, gpu]}
    said["topology"] = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    (tmp_path / "facts").write_text(probe.BEGIN + json.dumps(said))
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
case "$1" in
  *probe.py) echo noise; cat {tmp_path}/facts ;;
  *) echo "  --model-path MODEL_PATH"; echo "  --attention-backend {{fa3,triton}}" ;;
esac
"""
    )
    python.chmod(0o755)
    found = machine.read(Server(python=str(python)), FLAGS)
    assert found == Machine(
        "cuda", "0.5.17", {"model-path": (), "attention-backend": ("fa3", "triton")}, frozenset({"x"}),
        frozenset({"flashinfer"}), 2, "NVIDIA H200", (9, 0), "nvlink",
    )  # fmt: skip
    python.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    with pytest.raises(UserError, match="cannot say what machine this is: ImportError: no torch"):
        machine.read(Server(python=str(python)), FLAGS)
