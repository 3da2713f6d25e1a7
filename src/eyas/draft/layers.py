"""Which of the target's states a draft was made for."""

from pathlib import Path
from typing import Any

from eyas.capture.contract import Contract
from eyas.draft.files import read_config
from eyas.engines import target as targets
from eyas.engines.layers import resolve
from eyas.engines.sglang.layers import declared_layers
from eyas.errors import UserError


def layers_of(config: dict[str, Any], info: targets.TargetInfo) -> tuple[int, int, int]:
    """The hidden_states positions that a draft was made for: its contract's, its config's, else the default ones."""
    if contract := (config.get("eyas") or {}).get("contract"):
        return resolve(contract["layers"], "hidden_states", info.num_layers)
    return declared_layers(config, info.architecture, info.num_layers)


def require_layers(folder: Path, info: targets.TargetInfo, contract: Contract) -> None:
    """Raise UserError where the draft in `folder` was made for other states than `contract` says."""
    layers = layers_of(read_config(folder), info)
    if layers != contract.layers:
        raise UserError(
            f"{folder}: made for hidden states {list(layers)}, the run captures {list(contract.layers)}: set "
            "capture.layers to its own, or try it with `eyas replay`"
        )
