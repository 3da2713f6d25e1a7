"""From a launch script that works to a run file: `eyas init --launch launch.sh`."""

import contextlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eyas import config
from eyas.engines.sglang import shellscript
from eyas.engines.sglang.shellscript import Statement, Unknown
from eyas.errors import UserError

MODEL = ("model-path", "model")
DP = ("dp", "dp-size", "data-parallel-size")
SECRET = re.compile("TOKEN(?!IZ)|KEY|SECRET|PASSWORD", re.IGNORECASE)
"""In names of variables whose values do not belong into a file."""
TP = ("tp", "tp-size", "tensor-parallel-size")
DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}
HARMLESS = ("exec", "nohup", "time", "sudo", "env", "command")
CONTAINERS = ("docker", "podman", "nerdctl")
SHELLS = ("bash", "sh", "zsh")


@dataclass
class Launch:
    """What a script starts."""

    flags: list[tuple[str, list[str]]]
    """Name without dashes, values."""
    python: str
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """What the reader of the run file should know."""


def convert(path: Path, environment: Mapping[str, str]) -> str:
    """The text of a run file for what the script at `path` starts; `environment` fills variables that it does not set.

    Raises UserError: unreadable, no launch of SGLang in it or several, or something that cannot be understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the launch script ({error})") from error
    made = run_file(find(text, environment, str(path)), path)
    config.parse(yaml.safe_load(made), f"{path}, as a run file")
    return made


def find(text: str, environment: Mapping[str, str], where: str) -> Launch:
    """The one launch of SGLang in a script. Raises UserError."""
    script = shellscript.read(text, environment, where)
    found = [(one, at) for one in script.statements if (at := _launch_at(one.words)) is not None]
    inner = [one for one in script.statements if _inner_script(one.words) is not None]
    if len(found) + len(inner) > 1:
        lines = " and ".join(str(one.line) for one in [*(one for one, _ in found), *inner])
        raise UserError(f"{where}: lines {lines} each start SGLang; leave one in the script")
    if script.control and (found or inner):
        line, word = script.control
        raise UserError(f"{where} line {line}: cannot follow `{word}`; reduce the script to what it does in your case")
    if inner:
        launch = find(
            _inner_script(inner[0].words) or "", {**environment, **script.variables}, f"{where} line {inner[0].line}"
        )
        _container(inner[0].words, launch, script.variables)
        launch.env = script.environment | inner[0].assigned | launch.env
        return _without_secrets(launch)
    if not found:
        raise UserError(
            f"{where}: starts no SGLang server; looked for `python -m sglang.launch_server …` and `sglang serve …`"
        )
    statement, at = found[0]
    launch = Launch(_flags(statement, at, where), _python(statement.words, at), script.environment | statement.assigned)
    _before(statement.words[: at - 2 if _is_module(statement.words, at) else at - 1], launch, script.variables)
    _activated(script.statements, launch)
    if script.arguments:
        launch.notes.append('"$@": left out; add what the script is called with to server.args')
    _without_secrets(launch)
    for name, value in launch.env.items():
        if isinstance(value, Unknown):
            raise UserError(f"{value} (needed for {name})")
    return launch


def _without_secrets(launch: Launch) -> Launch:
    """Leaves out what should stay in the shell, from which the server has it too."""
    for name in [name for name in launch.env if SECRET.search(name)]:
        del launch.env[name]
        launch.notes.append(f"{name}: left out, its value may be a secret; set it in the shell that runs eyas")
    return launch


def _launch_at(words: list[str]) -> int | None:
    """Where the flags begin behind what starts SGLang; None where nothing does."""
    for at, word in enumerate(words):
        if word == "sglang.launch_server" and at and words[at - 1] == "-m":
            return at + 1
        if Path(word).name == "sglang" and words[at + 1 : at + 2] == ["serve"]:
            return at + 2
    return None


def _is_module(words: list[str], at: int) -> bool:
    return words[at - 1] == "sglang.launch_server"


def _inner_script(words: list[str]) -> str | None:
    """The script in `bash -c '…'` that starts SGLang."""
    for at, word in enumerate(words[:-1]):
        if re.fullmatch("-[a-z]*c", word) and at and Path(words[at - 1]).name in SHELLS and "sglang" in words[at + 1]:
            return words[at + 1]
    return None


def _python(words: list[str], at: int) -> str:
    """The interpreter that SGLang is started with."""
    if _is_module(words, at):
        known = at >= 3 and re.fullmatch(r"python[\d.]*", Path(words[at - 3]).name)
        return words[at - 3] if known else "python3"
    command = Path(words[at - 2])
    return str(command.parent / "python") if command.parent != Path() else "python3"


def _flags(statement: Statement, at: int, where: str) -> list[tuple[str, list[str]]]:
    """Flags and their values. Raises UserError: a word that cannot be evaluated, or belongs to no flag."""
    flags: list[tuple[str, list[str]]] = []
    words = statement.words[at:]
    for unknown in (word for word in words if isinstance(word, Unknown)):
        raise UserError(str(unknown))
    if words and not _is_module(statement.words, at) and not words[0].startswith("-"):
        words = ["--model-path", *words]
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            flags.append((name.replace("_", "-"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise UserError(f"{where} line {statement.line}: {word!r} belongs to no flag")
    return flags


def _before(words: list[str], launch: Launch, variables: Mapping[str, str]) -> None:
    """What stands before the interpreter: `env A=b`, `docker run …`, other commands."""
    if any(Path(word).name in CONTAINERS for word in words):
        _container(words, launch, variables)
        return
    left = []
    for word in words[:-1] if words and re.fullmatch(r"python[\d.]*", Path(words[-1]).name) else words:
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            launch.env[name] = value
        elif word not in HARMLESS:
            left.append(word)
    if left:
        launch.notes.append(f"left out, stood before the interpreter: {' '.join(left)}")


def _container(words: list[str], launch: Launch, variables: Mapping[str, str]) -> None:
    """Environment and warnings out of `docker run …`."""
    if not any(Path(word).name in CONTAINERS for word in words):
        return
    for at, word in enumerate(words):
        given = words[at + 1] if word in ("-e", "--env") and at + 1 < len(words) else None
        if word.startswith("--env="):
            given = word.removeprefix("--env=")
        if given is not None:
            name, equals, value = given.partition("=")
            if equals or name in variables:
                launch.env.setdefault(name, value if equals else variables[name])
    launch.python = "python3"
    launch.notes.append(
        "the script starts a container: run eyas inside it, or name an interpreter outside that has SGLang, and check "
        "that paths (target.model) are those that eyas sees"
    )


def _activated(statements: list[Statement], launch: Launch) -> None:
    """An environment that the script enters first decides what plain `python` is."""
    for one in statements:
        if one.words[0] in ("source", ".") and len(one.words) > 1 and one.words[1].endswith("bin/activate"):
            if "/" not in launch.python:
                launch.python = str(Path(one.words[1]).parent / "python")
        elif one.words[:2] in (["conda", "activate"], ["micromamba", "activate"]):
            launch.notes.append(
                f"the script enters {' '.join(one.words)}: name that environment's interpreter in server.python"
            )


def run_file(launch: Launch, path: Path) -> str:
    """A commented run file. Raises UserError: no model, several nodes, a dtype that eyas cannot capture."""
    target: dict[str, Any] = {}
    server: dict[str, Any] = {"python": launch.python}
    args: dict[str, Any] = {}
    notes = list(launch.notes)
    for name, values in launch.flags:
        value = _typed(values)
        if name in MODEL:
            target["model"] = " ".join(values)
        elif name in TP:
            server["tp"] = value
        elif name == "dtype":
            if str(value) not in DTYPES:
                raise UserError(f"{path}: --dtype {value} is none that eyas captures in: take bfloat16 or float32")
            target["dtype"] = DTYPES[str(value)]
        elif name == "trust-remote-code":
            server["trust_remote_code"] = True
        elif name in DP and value != 1:
            notes.append(
                f"--{name} {value}: left out; replicas behind one address cannot be told apart: start others by "
                "yourself and name all of them in server.url"
            )
        elif name.startswith("ssl-"):
            notes.append(f"--{name}: left out; eyas asks without TLS, and the server listens on this machine only")
        elif name in ("host", "port"):
            notes.append(f"--{name} {value}: left out; eyas listens on this machine only, on a free port (server.port)")
        elif name == "api-key":
            notes.append("--api-key: left out; the server listens on this machine only")
        elif name.startswith("speculative-"):
            notes.append(f"--{name} {' '.join(values)}".rstrip() + ": left out; states are captured without a draft")
        elif name == "nnodes" and value != 1:
            raise UserError(f"{path}: --nnodes {value}: a server over several machines cannot be captured from yet")
        elif name == "config":
            raise UserError(f"{path}: --config {value}: write the flags of that file into the script")
        elif name in ("nnodes", "node-rank", "dist-init-addr"):
            notes.append(f"--{name} {value}: left out; the server runs on this machine only")
        else:
            args[name] = value
    if not target.get("model"):
        raise UserError(f"{path}: the launch names no model (--model-path)")
    if any(name.startswith("speculative-") for name, _ in launch.flags):
        notes.append("the draft of the script is no part of the run: it is measured later, beside the new one")
    if not Path(target["model"]).expanduser().is_dir():
        notes.append(f"target.model: {target['model']} is no folder here; eyas takes a folder, so download it first")
    server |= {"args": args} if args else {}
    server |= {"env": dict(launch.env)} if launch.env else {}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target["model"]).name).strip("-._")[:100] or "own-model"
    head = [
        f"# Made from {path.name} by `eyas init`. Check it, then: eyas run THIS_FILE",
        *(f"# - {note}" for note in notes),
    ]
    given = {"target": target, "engine": {"kind": "sglang"}, "server": server}
    body = [_yaml({"name": name, "seed": 0}), *(_section(section, given.get(section, {})) for section in _sections())]
    return "\n".join(head) + "\n" + "\n".join(body)


def _typed(values: list[str]) -> Any:
    """A flag's value as YAML would have it: true for none, a list for several; numbers only where nothing is lost."""
    if not values:
        return True
    if len(values) > 1:
        return [_typed([value]) for value in values]
    for kind in (int, float):
        if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", values[0]):
            with contextlib.suppress(ValueError):
                if str(kind(values[0])) == values[0]:
                    return kind(values[0])
    return values[0]


def _sections() -> list[str]:
    fields = config.RunConfig.model_fields.items()
    return [name for name, info in fields if isinstance(info.annotation, type) and name not in ("name", "seed")]


def _section(name: str, given: dict[str, Any]) -> str:
    """A section: what the script gave, and its other fields as comments with their defaults."""
    kind = config.RunConfig.model_fields[name].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, config.Section)
    about = (inspect.getdoc(kind) or "").splitlines()[0]
    lines = [f"# {about}", f"{name}:" if given else f"# {name}:"]
    for field_name, info in kind.model_fields.items():
        if field_name in given:
            lines += ["  " + line for line in _yaml({field_name: given[field_name]}).splitlines()]
        elif not info.is_required():
            lines += ["#   " + line for line in _yaml({field_name: info.get_default()}).splitlines()]
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes strings that a run file's reader would take for numbers: 1e3."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", config.EXPONENT, list("-+.0123456789"))


def _yaml(values: dict[str, Any], indent: str = "") -> str:
    """Mappings line by line, everything below on one line."""
    lines = []
    for name, value in values.items():
        key = yaml.safe_dump(name).split("\n")[0]
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", _yaml(value, indent + "  ")]
        else:
            said = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, width=10**6, default_flow_style=True)
            lines.append(f"{indent}{key}: {said.removesuffix(chr(10)).removesuffix('...').rstrip()}")
    return "\n".join(lines)
