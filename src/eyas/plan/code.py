"""The digest of a step's code: of all sources that its entry imports, so that editing the scheduler repeats no capture.

Import statements are read, never executed, wherever they stand: at the top, inside functions, under TYPE_CHECKING. Only
modules of eyas (and of the entry's own top-level package) count, with the `__init__` of every package above them.
One rule for data: a folder below a package that holds no Python at all (`corpus/prompts/`) counts with that package.
A module that is imported by a computed name is not seen.
"""

import ast
import functools
import importlib.util
from pathlib import Path

from eyas.digests import digest_bytes, digest_json
from eyas.errors import UserError

HOME = __name__.partition(".")[0]


def digest(entry: str) -> str:
    """Digest of the code behind `package.module:function`. Raises UserError: no such module, not valid Python."""
    module = entry.partition(":")[0]
    found = closure(module)
    return digest_json({name: _digest_of(path) for name, path in found.items()})


def closure(module: str) -> dict[str, Path]:
    """The modules that `module` reaches, itself and data files included: name to source file."""
    roots = {HOME, module.partition(".")[0]}
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in found or name.partition(".")[0] not in roots:
            continue
        parent = name.rpartition(".")[0]
        if parent:
            todo.append(parent)
        path = _source(name)
        if path is None:
            if name == module:
                raise UserError(f"{module}: no such module")
            continue
        if path.is_dir():
            found |= _data(name, path)
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else parent
        try:
            todo += imports(path.read_bytes(), package)
        except SyntaxError as error:
            raise UserError(f"{path} line {error.lineno}: not valid Python ({error.msg})") from error
        if path.name == "__init__.py":
            found |= _data(name, path.parent)
    return dict(sorted(found.items()))


@functools.cache
def imports(source: bytes, package: str) -> tuple[str, ...]:
    """Names that a module's import statements may mean: `from a import b` gives a and a.b."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(names))


@functools.cache
def _root(top: str) -> Path | None:
    """Folder of a top-level package, or file of a top-level module. Nothing is imported."""
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _source(name: str) -> Path | None:
    """Source of a module: its file, a package's `__init__.py`, or the bare folder of a namespace package."""
    top, *below = name.split(".")
    root = _root(top)
    if root is None or (below and root.is_file()):
        return None
    path = root.joinpath(*below)
    candidates = [path / "__init__.py", path.with_name(path.name + ".py"), path]
    return next((c for c in candidates if c.exists()), None)


def _data(package: str, folder: Path) -> dict[str, Path]:
    """Files of a package's data folders."""
    found = {}
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith((".", "__")) and not any(path.rglob("*.py")):
            for file in path.rglob("*"):
                if file.is_file() and not file.name.startswith("."):
                    found[f"{package}/{file.relative_to(folder).as_posix()}"] = file
    return found


def _digest_of(path: Path) -> str:
    return digest_bytes(path.read_bytes())
