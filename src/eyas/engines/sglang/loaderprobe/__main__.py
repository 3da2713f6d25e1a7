"""Run by the interpreter that has SGLang: which tensors of a draft does SGLang's own class take?

`python …/loaderprobe DRAFT CPU`, CPU being the folder of `engines/sglang/cpu`. The class named in config.json is built
without memory (meta tensors) and given each tensor's name and shape, one at a time; what it writes is watched. The last
line printed is JSON: `{"sglang", "ignored": [tensor], "refused": {tensor: why}, "unfilled": [parameter]}`. Nothing of
eyas is imported here.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

PARTS = {"qkv_proj": {"q", "k", "v"}, "gate_up_proj": {0, 1}}
"""What a parameter that is joined from several tensors needs."""
ONE = ("tp_size", "pp_size", "attn_tp_size", "attn_dp_size", "attn_cp_size", "moe_tp_size")
FIRST = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "moe_tp_rank")


def shapes(folder: Path) -> dict[str, list[int]]:
    """Every tensor of the folder's safetensors files with its shape, from their headers."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return found


def build(folder: Path) -> Any:
    """SGLang's model of the draft, on the meta device, as the only rank of one."""
    from sglang.srt.models import llama_eagle3
    from sglang.srt.runtime_context import get_context, get_parallel
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = getattr(llama_eagle3, config.architectures[0])
    get_context().override_server_args(device="cpu").install()
    alone = {**dict.fromkeys(ONE, 1), **dict.fromkeys(FIRST, 0)}
    with torch.device("meta"), get_parallel().override(**alone, pp_group=None):
        return kind(config)


def watch(model: Any, given: dict[str, list[int]]) -> dict[str, Any]:
    """Give the model each tensor, and see what it does with it."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    written: list[tuple[str, Any]] = []
    parameters = dict(model.named_parameters())

    def watched(name: str, loader: Any) -> Any:
        def load(parameter: Any, tensor: Any, *part: Any) -> None:
            loader(parameter, tensor, *part)
            written.append((name, part[0] if part else None))

        return load

    for name, parameter in parameters.items():
        parameter.weight_loader = watched(name, getattr(parameter, "weight_loader", default_weight_loader))
    ignored, refused = [], {}
    for name, shape in given.items():
        before, map_before = len(written), getattr(model, "hot_token_id", None)
        dtype = torch.int64 if name.endswith("d2t") else torch.bool if name.endswith("t2d") else torch.float32
        try:
            with torch.device("meta"):
                model.load_weights([(name, torch.empty(shape, dtype=dtype))])
        except Exception as error:
            refused[name] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            continue
        mapped = getattr(model, "hot_token_id", None) is not map_before
        if len(written) == before and not mapped and not name.endswith("t2d"):  # of t2d every engine says no need
            ignored.append(name)
    unfilled = []
    for name in parameters:
        parts = {part for to, part in written if to == name}
        if parts != PARTS.get(name.split(".")[-2], {None}) and "embed_tokens" not in name:  # that one is the target's
            unfilled.append(name)
    return {"ignored": ignored, "refused": refused, "unfilled": unfilled}


def main() -> None:
    """Print what was found."""
    folder, cpu = Path(sys.argv[1]), sys.argv[2]
    if torch.version.cuda is None and torch.version.hip is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        sys.path.insert(0, cpu)
        runpy.run_path(str(Path(cpu) / "sitecustomize.py"))
    import sglang

    print(json.dumps({"sglang": sglang.__version__, **watch(build(folder), shapes(folder))}))


if __name__ == "__main__":
    main()
