"""What went wrong, in a user's words: exceptions that are no fault of eyas become UserErrors."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eyas.errors import UserError
from eyas.files import plain_os_errors

TRAIN_MODULES = ("torch", "transformers", "safetensors", "numpy", "jinja2")
MEMORY_TEXTS = (
    "out of memory",
    "cannot allocate memory",
    "failed to map segment",
    "unable to mmap",
    "defaultcpuallocator",
    "memory allocation still failed",
    "std::bad_alloc",
)
ANYWHERE = "end other programs and run the same command again"
IN_A_RUN = (
    "lower answers.batch or train.batch_tokens in the run file, or end other programs, and run it again; "
    "what is finished is kept"
)
"""The remedies for exhausted memory."""


@contextlib.contextmanager
def plain_errors(where: Path, remedy: str = ANYWHERE) -> Iterator[None]:
    """Turn missing extras, exhausted memory, full disks and missing rights into a UserError with a remedy."""
    with plain_os_errors(where):
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if _exhausted(error):
                raise UserError(f"out of memory: {remedy}") from error
            if isinstance(error, ImportError) and (plain := missing_extra(error)):
                raise plain from error
            raise


def about_memory(text: str) -> bool:
    """Whether a fault's text says that memory was exhausted."""
    return any(known in text.lower() for known in MEMORY_TEXTS)


def _exhausted(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is exhausted memory: libraries wrap it in errors of their own."""
    while error is not None:
        if isinstance(error, MemoryError) or about_memory(str(error)):
            return True
        error = error.__cause__
    return False


def missing_extra(error: ImportError) -> UserError | None:
    """The line that names the extra to install, if that is why an import failed."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    top = (error.name or "").partition(".")[0]
    if top in TRAIN_MODULES:
        extra = "train"
        return UserError(f"{top} is not installed: pip install 'eyas[{extra}]'")
    if top == "matplotlib":
        return UserError("matplotlib is not installed: pip install 'eyas[report]'")
    return None
