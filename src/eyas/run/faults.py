"""What went wrong, in a user's words: exceptions that are no fault of eyas become UserErrors."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eyas.errors import UserError
from eyas.files import plain_os_errors

TRAIN_MODULES = ("torch", "transformers", "safetensors", "numpy", "jinja2")
MEMORY_TEXTS = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "out of memory")


@contextlib.contextmanager
def plain_errors(where: Path) -> Iterator[None]:
    """Turn missing extras, exhausted memory, full disks and missing rights into a UserError with a remedy."""
    try:
        with plain_os_errors(where):
            try:
                yield
            except RuntimeError as error:
                if any(text in str(error) for text in MEMORY_TEXTS):
                    raise MemoryError(str(error).splitlines()[0]) from error
                raise
    except ImportError as error:
        if plain := missing_extra(error):
            raise plain from error
        raise


def missing_extra(error: ImportError) -> UserError | None:
    """The line that names the extra to install, if that is why an import failed."""
    top = (error.name or "").partition(".")[0]
    if top in TRAIN_MODULES:
        extra = "train"
        return UserError(f"{top} is not installed: pip install 'eyas[{extra}]'")
    if top == "matplotlib":
        return UserError("matplotlib is not installed: pip install 'eyas[report]'")
    return None
