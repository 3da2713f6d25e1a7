"""First step of a run: what is the target? Looks at the model's files; the model itself is not loaded.

The digests made here go into the capture contract: a store or a draft that was made with another model, tokenizer or
chat template is refused by them.
"""

import difflib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.config import Engine, Target
from eyas.engines import fetch, modelfolder
from eyas.errors import UserError
from eyas.files import plain_os_errors, read_json, write_json
from eyas.progress import Progress, Silent
from eyas.spec import StepSpec

IN_PROCESS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
FILE = "target.json"


@dataclass(frozen=True)
class TargetInfo:
    """What is known of a target without loading it."""

    folder: Path
    config: dict[str, Any]
    """The whole config.json."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Sorted; any of them ends an answer."""
    model_digest: str
    tokenizer_digest: str
    template_digest: str

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        text: dict[str, Any] = self.config.get("text_config") or self.config
        return text


def run(spec: StepSpec, out: Path, progress: Progress) -> dict[str, Any]:
    """Step entry: fetch and inspect the target, write target.json. Raises UserError."""
    model = spec.section(Target).model
    info = inspect(model, progress)
    if spec.section(Engine).kind == "transformers":
        require_in_process(info)
    write_json(out / FILE, {"model": model, **asdict(info), "folder": str(info.folder)})
    return {
        "folder": str(info.folder),
        "model_digest": info.model_digest,
        "architecture": info.architecture,
        "layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
    }


def read(out: Path) -> TargetInfo:
    """What the target step found, from its output folder.

    A fetched model is verified, and made again where it is damaged or gone. Raises UserError: the folder has gone.
    """
    found = read_json(out / FILE)
    model, path = found.pop("model"), Path(found.pop("folder"))
    if model in fetch.MODELS:
        path = fetch.fetch(model, Silent())
    elif not (path / "config.json").is_file():
        raise UserError(f"{path}: the target has gone since the run began; put it back, or name it in target.model")
    return TargetInfo(**{**found, "folder": path, "eos_token_ids": tuple(found["eos_token_ids"])})


def inspect(model: str, progress: Progress) -> TargetInfo:
    """Look at a model: the name of one that eyas can fetch, or a folder in the Hugging Face layout.

    Raises UserError: no such model or folder, half-downloaded or damaged files, no safetensors, no tokenizer, no chat
    template, a config that lacks what a target needs.
    """
    path = fetch.fetch(model, progress) if model in fetch.MODELS else folder_of(model)
    progress.milestone(f"looking at {path.name}")
    with plain_os_errors(path):
        if not (path / "config.json").exists():
            raise UserError(f"{path}: no config.json, so not a model folder in the Hugging Face layout")
        modelfolder.refuse_half_downloaded(path)
        config = modelfolder.read_object(path / "config.json")
        text = config.get("text_config") or config
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise UserError(f"{path / 'config.json'}: names no architecture; take a complete model")
        vocab_size = _size(text, "vocab_size", path)
        return TargetInfo(
            folder=path,
            config=config,
            architecture=str(architectures[0]),
            num_layers=_size(text, "num_hidden_layers", path),
            hidden_size=_size(text, "hidden_size", path),
            vocab_size=vocab_size,
            eos_token_ids=modelfolder.eos_token_ids(path, config, vocab_size),
            model_digest=modelfolder.model_digest(path, modelfolder.weight_files(path)),
            tokenizer_digest=modelfolder.tokenizer_digest(path),
            template_digest=modelfolder.template_digest(path),
        )


def require_in_process(info: TargetInfo) -> None:
    """Refuse a target that the in-process engine cannot run exactly. Raises UserError."""
    where = info.folder / "config.json"
    if info.architecture not in IN_PROCESS:
        raise UserError(f"{where}: {info.architecture} cannot be run in-process; supported are {', '.join(IN_PROCESS)}")
    if info.config.get("quantization_config"):
        raise UserError(f"{where}: quantised weights cannot be run in-process; take the unquantised model")
    for key, neutral in (("logit_scale", 1.0), ("final_logit_softcapping", None)):
        if info.text_config.get(key, neutral) not in (neutral, None):
            raise UserError(
                f"{where}: {key} changes the logits, which the in-process engine does not know; take another"
            )


def folder_of(model: str) -> Path:
    """The folder that target.model names. Raises UserError: there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise UserError(f"target.model: {model} is a file; give the model's folder, with config.json and safetensors")
    known = ", ".join(fetch.MODELS)
    near = difflib.get_close_matches(model.lower().rpartition("/")[2], fetch.MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"eyas can fetch {known}"
    raise UserError(f"target.model: no folder {model}; {hint}; other models: download one and give its folder")


def _size(text: dict[str, Any], key: str, path: Path) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path / 'config.json'}: {key} is {value!r}; take a complete model")
    return value
