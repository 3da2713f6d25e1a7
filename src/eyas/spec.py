"""What a step is told. Shared by the runner, which writes it, and the step entries, which read it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eyas.config import RunConfig, Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class StepSpec:
    """One step's orders."""

    step: str
    seed: int
    config: dict[str, Any]
    """Run-file sections by name, as plain JSON values."""
    inputs: dict[str, Path]
    """Finished output folders of the steps that this one needs."""
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`ready.json` of each leased service."""

    def section(self, kind: type[S]) -> S:
        """The checked section of this kind, `spec.section(config.Train)`.

        Raises KeyError where the graph did not declare that this step reads it.
        """
        for name, info in RunConfig.model_fields.items():
            if info.annotation is kind:
                return kind.model_validate(self.config[name])
        raise KeyError(kind.__name__)
