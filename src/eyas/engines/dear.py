"""The same model made dear: layers that change no token and cost what a larger target's do.

A layer whose output projections (o_proj, down_proj) are zero adds nothing to the residual stream, yet an engine
computes and caches all of it. So a small model and its draft, which take minutes, show what a draft is worth on a
target that costs N times as much a token: same answers, same states, same acceptance.

The dear layers go behind the real ones: hidden_states indices up to the number of real layers are the same tensors. The
default layers depend on the number of layers, so a draft of the cheap model needs explicit ids on the dear one.
"""

import json
import shutil
from pathlib import Path

from eyas.engines import weights
from eyas.errors import UserError
from eyas.files import read_json, write_json

ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
DEAR = "dear.safetensors"


def make(folder: Path, out: Path, times: int) -> Path:
    """`out`: a copy of the Llama-type model in `folder` with `times` as many layers, the added ones without effect.

    Weights of the added layers are the first layer's, but for the zeros. Raises UserError: not such a model.
    """
    from safetensors.torch import load_file, save_file

    config = read_json(folder / "config.json")
    single = folder / weights.SINGLE
    if config.get("model_type") != "llama" or not single.is_file():
        raise UserError(f"{folder}: only a Llama-type model in one {weights.SINGLE} can be made dear")
    layers = int(config["num_hidden_layers"])
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("config.json", weights.SINGLE):
            shutil.copyfile(path, out / path.name)
    state = load_file(single)
    first = {name.removeprefix("model.layers.0."): t for name, t in state.items() if name.startswith("model.layers.0.")}
    assert set(ZERO) <= set(first), "a Llama layer has both projections"
    added = {
        f"model.layers.{number}.{name}": (tensor * 0 if name in ZERO else tensor).clone()
        for number in range(layers, layers * times)
        for name, tensor in first.items()
    }
    shutil.copyfile(single, out / "real.safetensors")
    places = dict.fromkeys(state, "real.safetensors")
    if added:
        save_file(added, out / DEAR, metadata={"format": "pt"})
        places |= dict.fromkeys(added, DEAR)
    (out / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    changed = {"num_hidden_layers": layers * times}
    if "max_window_layers" in config:
        changed["max_window_layers"] = layers * times
    write_json(out / "config.json", {**config, **changed})
    return out
