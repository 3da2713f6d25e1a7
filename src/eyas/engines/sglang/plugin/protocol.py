"""What a capturing client and the plugin inside the server agree on. Standard library only: both sides import it.

A request is captured if its `rid` is `eyas:<kind>:<tokens>:<name>`. Kind `c` (capture): the first tensor-parallel rank
writes `<root>/<name>.safetensors`. Kind `r` (ranks): every rank writes `<root>/<name>.rank<k>.safetensors`, so that
they can be compared. The token count tells the plugin when a request that is prefilled in chunks is complete. A file
appears whole, by rename from `.<name>.partial`; `<name>.failed` holds a line that says why there is no file; it
is empty where the disk had no room for that line.

The file is a safetensors file: `ids` int32 [T] as the forward pass saw them, `aux` [T, 3H], `last` [T, H] after the
final norm, both in the model's dtype. Its metadata: `format`, `rid`, `layers` (JSON list of hidden_states indices).

What to do is in the JSON file that the environment variable EYAS_CAPTURE names: `root`, `status` (folders), `layers`
(three hidden_states indices, or null for the default ones), `staging_bytes`, `hold_seconds`. Each rank writes
`<status>/rank<k>.json` once its model has been told which layers to collect; without that file nothing is captured.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "eyas-capture-1"
VARIABLE = "EYAS_CAPTURE"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_RID = re.compile(rf"eyas:([cr]):([1-9][0-9]{{0,8}}):({NAME.pattern})")


@dataclass(frozen=True)
class Orders:
    """What the plugin is asked to do: the content of the file that EYAS_CAPTURE names."""

    root: Path
    status: Path
    layers: tuple[int, int, int] | None
    staging_bytes: int
    """Pinned host memory in which chunks wait for their file."""
    hold_seconds: float
    """How long a full staging memory, or a full disk, may hold the server before captures are given up."""

    def write(self, path: Path) -> None:
        """Write the orders as JSON."""
        fields: dict[str, Any] = {**self.__dict__, "root": str(self.root), "status": str(self.status)}
        path.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls) -> "Orders":
        """The orders of this process. Raises OSError, ValueError, KeyError."""
        data = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        layers = tuple(data["layers"]) if data["layers"] is not None else None
        return cls(
            Path(data["root"]), Path(data["status"]), layers, int(data["staging_bytes"]), float(data["hold_seconds"])
        )


@dataclass(frozen=True)
class Wanted:
    """A request that is to be captured."""

    name: str
    tokens: int
    every_rank: bool = False

    @property
    def rid(self) -> str:
        """The request id that asks for it. `name` has been checked against NAME."""
        return f"eyas:{'r' if self.every_rank else 'c'}:{self.tokens}:{self.name}"

    @classmethod
    def of(cls, rid: str) -> "Wanted | None":
        """What a request id asks for; None for all that is not ours (plain requests, HEALTH_CHECK_*)."""
        found = _RID.fullmatch(rid)
        return cls(found[3], int(found[2]), found[1] == "r") if found else None

    def file(self, root: Path, rank: int = 0) -> Path:
        """Where the finished capture lies."""
        return root / (f"{self.name}.rank{rank}.safetensors" if self.every_rank else f"{self.name}.safetensors")

    def partial(self, root: Path, rank: int = 0) -> Path:
        """Where it is written; it exists from the first chunk on."""
        return root / (f".{self.name}.rank{rank}.partial" if self.every_rank else f".{self.name}.partial")

    def failed(self, root: Path) -> Path:
        """Where the reason lies if there is none."""
        return root / f"{self.name}.failed"


def status_file(status: Path, rank: int) -> Path:
    """Where a rank says that it is loaded: a JSON object with `pid`, `rank`, `tp`, `sglang`, `torch`, `model`, `layers`
    (hidden_states indices), `num_layers`, `hidden_size`, `vocab_size`, `dtype`, `device`, `root`, `problem` (null, or
    why nothing can be captured).
    """
    return status / f"rank{rank}.json"
