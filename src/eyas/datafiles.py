"""What a name of data means: the built-in prompts, files, folders, globs, or a Hugging Face data set.

Read by the plan, which digests the files, and by the corpus, which reads them. Imports nothing heavy.
"""

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from eyas.errors import UserError

BUILTIN, HUB = "builtin", "hf:"
KINDS = {
    ".txt": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
PACKED = (".gz", ".bz2", ".xz", ".zst")
READABLE = ", ".join([*KINDS, *(f"the text ones also as {packed}" for packed in ("/".join(PACKED),))])
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")


def expand(name: str) -> list[str]:
    """The files that `name` means, sorted; a data set of the hub as `hf:owner/name[:split]`.

    A file is taken as it is; of a folder (searched to any depth) and of a glob, all that can be read; hidden files
    never. Raises UserError: nothing there, or nothing that can be read.
    """
    if name.startswith(HUB):
        return [name]
    path = Path(name).expanduser()
    if path.is_dir():
        found = [str(file) for file in path.rglob("*") if _shown(file.relative_to(path)) and file.is_file()]
    elif path.exists():
        kind(name)
        return [str(path)]
    elif glob.has_magic(name):
        found = [file for file in glob.iglob(str(path), recursive=True) if Path(file).is_file()]  # noqa: PTH207
    elif _ON_HUB.fullmatch(name) and kind_or_none(name) is None:
        return [HUB + name]
    else:
        raise UserError(f"cannot read {name} (No such file or directory)")
    readable = sorted(file for file in found if kind_or_none(file))
    if not readable:
        raise UserError(f"{name}: holds no file that can be read; data are read from {READABLE}")
    return readable


def refuse_inputs(names: Iterable[str], outputs: Iterable[Path]) -> None:
    """Raises UserError: a file that is going to be written is one of those that `names` mean."""
    written = {path.resolve() for path in outputs}
    for name in names:
        for file in [] if name == BUILTIN else expand(name):
            if not file.startswith(HUB) and Path(file).resolve() in written:
                raise UserError(f"{file}: is read here, and --out would write over it; choose another --out")


def kind(name: str) -> str:
    """text, json, csv or parquet, by the suffix. Raises UserError: another one."""
    found = kind_or_none(name)
    if found is None:
        raise UserError(f"{name}: data are read from {READABLE}, or give `{BUILTIN}`")
    return found


def kind_or_none(name: str) -> str | None:
    """As `kind`, None for what cannot be read."""
    path = Path(name)
    packed = path.suffix.lower() in PACKED
    found = KINDS.get(Path(path.stem).suffix.lower() if packed else path.suffix.lower())
    return None if packed and found == "parquet" else found


def absolute(name: str) -> str:
    """The same name from any working folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() or glob.has_magic(name) else name


def _shown(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)
