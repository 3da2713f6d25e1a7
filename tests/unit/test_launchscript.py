"""Launch scripts become run files that load, or are refused in one line."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas import cli, config
from eyas.engines.sglang import launchscript
from eyas.errors import UserError

SERVE = "python3 -m sglang.launch_server --model-path /m"
FULL = r"""#!/usr/bin/env bash
set -euo pipefail
# Our production server
export CUDA_VISIBLE_DEVICES=0,1,2,3   # four of them
export SGLANG_X="a b"
NOT_EXPORTED=1
MODEL=${MODEL:-/models/Kimi K2}
TP=4
source /opt/venv/bin/activate
EXTRA=(
  --mem-fraction-static 0.90   # leave room
  --cuda-graph-bs 1 2 4 8
)
EXTRA+=(--chunked-prefill-size -1)
mkdir -p logs
NCCL_DEBUG=WARN exec python3 -m sglang.launch_server \
  --model-path "$MODEL" --tp=$TP \
  --port 30000 --host 0.0.0.0 \
  --trust-remote-code --dtype bfloat16 \
  --speculative-algorithm EAGLE3 --speculative-num-steps=3 \
  --model-loader-extra-config '{"a": true}' \
  "${EXTRA[@]}" --tool_call_parser kimi_k2 --disable-radix-cache "$@" 2>&1 | tee logs/server.log
"""


def loaded(tmp_path: Path, script: str, **environment: str) -> tuple[config.RunConfig, str]:
    path = tmp_path / "launch.sh"
    path.write_text(script)
    text = launchscript.convert(path, environment)
    (tmp_path / "run.yaml").write_text(text)
    return config.load(tmp_path / "run.yaml"), text


def server(tmp_path: Path, script: str, **environment: str) -> config.Server:
    return loaded(tmp_path, script, **environment)[0].server


def test_a_whole_script(tmp_path: Path) -> None:
    run, text = loaded(tmp_path, FULL)
    assert (run.name, run.engine.kind) == ("Kimi-K2", "sglang")
    assert (run.target.model, run.target.dtype) == ("/models/Kimi K2", "bfloat16")
    assert (run.server.python, run.server.tp, run.server.trust_remote_code) == ("/opt/venv/bin/python", 4, True)
    assert run.server.args == {
        "model-loader-extra-config": '{"a": true}',
        "mem-fraction-static": "0.90",
        "cuda-graph-bs": [1, 2, 4, 8],
        "chunked-prefill-size": -1,
        "tool-call-parser": "kimi_k2",
        "disable-radix-cache": True,
    }
    assert run.server.env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NCCL_DEBUG": "WARN", "SGLANG_X": "a b"}
    for note in ("--port 30000: left out", "--host 0.0.0.0: left out", "--speculative-num-steps 3: left out"):
        assert f"# - {note}" in text
    assert "it is measured later" in text
    assert "/models/Kimi K2 is no folder here" in text
    # Every other field stands there as a comment with its default.
    assert "# train:\n#   ttt_steps: 7\n" in text
    uncommented = text.replace("\n#   ", "\n  ").replace("\n# train:", "\ntrain:")
    assert "\ntrain:\n  ttt_steps: 7\n" in uncommented


def test_the_environment_fills_what_the_script_leaves_open(tmp_path: Path) -> None:
    assert loaded(tmp_path, "M=$HOME/x\n" + SERVE.replace("/m", "$M"), HOME="/h")[0].target.model == "/h/x"
    assert loaded(tmp_path, FULL, MODEL="/other")[0].target.model == "/other"


@pytest.mark.parametrize(
    ("script", "python", "env"),
    [
        (SERVE, "python3", {}),
        (SERVE.replace("python3", "/v/bin/python3.11"), "/v/bin/python3.11", {}),
        ("A=1 B='x y' nohup " + SERVE + " > log 2>&1 &", "python3", {"A": "1", "B": "x y"}),
        ("env A=1 " + SERVE + " &> log", "python3", {"A": "1"}),
        ("sglang serve --model-path /m", "python3", {}),
        ("/v/bin/sglang serve /m", "/v/bin/python", {}),
        (
            "docker run --gpus all -e A=1 --env B=2 --env=C=3 -v /a:/m --rm lmsys/sglang:latest \\\n  " + SERVE,
            "python3",
            {"A": "1", "B": "2", "C": "3"},
        ),
        (f'docker run -e A=1 image bash -c "export B=2 && {SERVE}"', "python3", {"A": "1", "B": "2"}),
        (f"bash -lc 'X=3 {SERVE}'", "python3", {"X": "3"}),
        ("cd /x && " + SERVE, "python3", {}),
    ],
)
def test_ways_to_start(tmp_path: Path, script: str, python: str, env: dict[str, str]) -> None:
    run, text = loaded(tmp_path, script)
    assert (run.server.python, run.server.env, run.target.model) == (python, env, "/m")
    assert ("the script starts a container" in text) == ("docker" in script)


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("--a 1 --b=0.5 --c 1e-3", {"a": 1, "b": 0.5, "c": "1e-3"}),
        (
            "--served-model-name 1.10 --revision 1e3 --a 1e-05",
            {"served-model-name": "1.10", "revision": "1e3", "a": 1e-5},
        ),
        ('--a ${X:-${Y:-/x}} --b "${X:-${V:-}s}"', {"a": "/x", "b": "1 2s"}),
        ("--a 007 --b 1.2.3 --c true", {"a": "007", "b": "1.2.3", "c": "true"}),
        ("--a '' --b \"x # y\" # z", {"a": "", "b": "x # y"}),
        ("--lora-paths a=/b c=/d", {"lora-paths": ["a=/b", "c=/d"]}),
        ("--a 'it'\"'\"'s' --b x\\ y", {"a": "it's", "b": "x y"}),
        ('--a $V --b "$V" --c \'$V\' --d ${V}s --e "${NONE:-$V}"', None),
        ('--a "${V:+set}" --b ${NONE:+x}', {"a": "set", "b": True}),
    ],
)
def test_values(tmp_path: Path, words: str, args: dict[str, object] | None) -> None:
    if args is None:
        args = {"a": ["1", "2"], "b": "1 2", "c": "$V", "d": ["1", "2s"], "e": "1 2"}
        args |= {"a": [1, 2], "d": [1, "2s"]}
    assert server(tmp_path, f'V="1 2"\n{SERVE} {words}').args == args


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo hello", "launch.sh: starts no SGLang server"),
        (SERVE + "\n" + SERVE, "launch.sh: lines 1 and 2 each start SGLang"),
        ("if true; then\n" + SERVE + "\nfi", "launch.sh line 1: cannot follow `if`"),
        (SERVE.replace("/m", "$(cat model)"), "launch.sh line 1: $(cat model) cannot be evaluated here"),
        ("\nM=`cat x`\n" + SERVE.replace("/m", '"$M"'), "launch.sh line 2: `cat x` cannot be evaluated here"),
        (
            "export HOSTNAME=$(hostname)\n" + SERVE,
            "cannot be evaluated here; write what it gives (needed for HOSTNAME)",
        ),
        (SERVE.replace("/m", "$MODEL_DIR"), "launch.sh line 1: $MODEL_DIR is not set in the script"),
        (SERVE + " --a ${X:-$NONE}", "launch.sh line 1: $NONE is not set in the script"),
        (SERVE + " --pp-size 2", "server.args: pp-size: no process of a pipeline sees all layers"),
        (SERVE.replace("/m", "$1"), "launch.sh line 1: $1 is only known when the script runs"),
        (SERVE + " --a 'x", "launch.sh line 1: a quote ' is not closed"),
        (SERVE + ' --a "x', 'launch.sh line 1: a quote " is not closed'),
        ("A=(--b\n", "a bracket ( is not closed"),
        ("python3 -m sglang.launch_server --tp 2", "the launch names no model"),
        ("python3 -m sglang.launch_server /m", "line 1: '/m' belongs to no flag"),
        (SERVE + " --dtype half", "--dtype half is none that eyas captures in"),
        (SERVE + " --nnodes 2", "--nnodes 2: a server over several machines"),
        (SERVE + " --config c.yaml", "--config c.yaml: write the flags of that file into the script"),
        (SERVE + " --tp x", "server.tp: should be a valid integer"),
    ],
)
def test_refusals(tmp_path: Path, script: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(tmp_path, script)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_command_substitution_that_does_not_matter(tmp_path: Path) -> None:
    assert server(tmp_path, "NOW=$(date +%s)\necho $NOW `uname`\n" + SERVE).args == {}


def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    script = f'export HF_TOKEN=$(cat t) MY_API_KEY=abc TOKENIZERS_PARALLELISM=1\n{SERVE} --dp 2 --ssl-keyfile k "$@"'
    run, text = loaded(tmp_path, script + " --nnodes 1 --node-rank 0")
    assert (run.server.env, run.server.args) == ({"TOKENIZERS_PARALLELISM": "1"}, {})
    assert "abc" not in text
    for name in ("HF_TOKEN", "MY_API_KEY", "--dp 2", "--ssl-keyfile", '"$@"', "--nnodes 1", "--node-rank 0"):
        assert f"# - {name}: left out" in text


def test_missing_script(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the launch script"):
        launchscript.convert(tmp_path / "none.sh", {})


def test_any_beginning_of_a_script_is_read_or_refused(tmp_path: Path) -> None:
    for end in range(0, len(FULL), 5):
        for text in (FULL[:end], FULL[:end] + "\\", FULL[:end] + "${"):
            with contextlib.suppress(UserError):
                launchscript.run_file(launchscript.find(text, {}, "x"), tmp_path / "x")


def test_eyas_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def eyas(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.chdir(tmp_path)
    Path("launch.sh").write_text(SERVE + " --tp 2")
    code, out, err = eyas("init", "--launch", "launch.sh")
    assert (code, err) == (0, "")
    assert "\n  tp: 2\n" in out
    assert eyas("init", "--launch", "launch.sh", "--out", "run.yaml") == (0, "run.yaml\n", "")
    assert Path("run.yaml").read_text() == out
    code, _, err = eyas("init", "--launch", "launch.sh", "--out", "run.yaml")
    assert (code, err) == (2, "eyas: run.yaml is there already: choose another name or delete it\n")
    assert Path("run.yaml").read_text() == out
    assert eyas("init", "--launch", "launch.sh", "--out", "no/run.yaml")[0] == 2
    code, out, _ = eyas("plugin", "plug")
    assert code == 0
    assert f"export EYAS_CAPTURE={tmp_path}/plug/orders.json" in out


def test_eyas_init_on_a_full_disk_leaves_nothing(tmp_path: Path, tmpfs: Callable[[str], Path]) -> None:
    (tmp_path / "launch.sh").write_text(SERVE)
    out = tmpfs("4k") / "run.yaml"
    out.with_name("other").write_bytes(bytes(4096))
    with pytest.raises(UserError, match=r"disk full while writing .*\(0 MiB free\)"):
        cli.init(tmp_path / "launch.sh", out)
    assert not out.exists(), "it would be in the way of the next attempt"
