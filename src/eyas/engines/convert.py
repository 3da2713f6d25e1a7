"""A Llama-like GGUF -> the model folder that transformers and the serving engines read, in bfloat16.

Nothing is lost beyond rounding to bfloat16: the weights are bit for bit what transformers' own GGUF loader gives. Its
tokenizer is not, and ours is the right one: SmolLM splits digits off before anything else, so that an empty line before
"1." is one token, as in training, and not two.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.engines.gguf import GGUF
from eyas.errors import UserError
from eyas.files import write_atomic, write_json
from eyas.progress import Progress

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # token type of <|im_end|> and the like


def write_model(source: Path, folder: Path, progress: Progress) -> None:
    """Write config, tokenizer, chat template and model.safetensors of the GGUF file `source` into `folder`.

    `progress` is told the bytes of weights. Raises UserError: not a Llama with SmolLM's tokenizer, damaged; OSError.
    """
    gguf = GGUF(source)
    try:
        kinds = tuple(gguf.metadata[key] for key in ("general.architecture", "tokenizer.ggml.pre"))
        if kinds != ("llama", "smollm"):
            raise UserError(f"{source}: eyas converts llama models with a smollm tokenizer, not {' with '.join(kinds)}")
        config = _config(gguf)
        write_json(folder / "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(folder / "generation_config.json", ids)
        _write_tokenizer(gguf, folder)
        _write_weights(gguf, config, folder / "model.safetensors", progress)
    except KeyError as error:
        raise UserError(f"{source}: {error.args[0]} is missing; install its package again") from error


def _config(gguf: GGUF) -> dict[str, Any]:
    meta = gguf.metadata
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        # Stored as float32: 9.999999747e-06 was written as 1e-5.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "max_position_embeddings": meta["llama.context_length"],
        # Both spellings: transformers 5 reads the first, the engines of today the second.
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(gguf: GGUF, folder: Path) -> None:
    meta = gguf.metadata
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": index, "content": token, **flags, "special": True}
        for index, (token, kind) in enumerate(zip(tokens, meta["tokenizer.ggml.token_type"], strict=True))
        if kind == _CONTROL
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_],
        },
        "post_processor": None,
        "decoder": bytes_,
        "model": model,
    }
    write_atomic(folder / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **settings,
        },
    )
    write_atomic(folder / "chat_template.jinja", meta["tokenizer.chat_template"])


def _write_weights(gguf: GGUF, config: dict[str, Any], path: Path, progress: Progress) -> None:
    """model.safetensors, tensor after tensor: never more than one of them in memory."""
    names = {_renamed(name): name for name in gguf.tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for new, old in sorted(names.items()):
        shape = gguf.tensors[old].shape
        start, end = end, end + 2 * int(np.prod(shape))
        header[new] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    progress.total(end, "bytes")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for new, old in sorted(names.items()):
            values = gguf.read(old)
            if new.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config["num_attention_heads" if "q_proj" in new else "num_key_value_heads"]
                values = _rotary_halves(values, heads)
            for piece in _pieces(values):
                file.write(_bfloat16(piece).data)
            progress.advance(2 * values.size)


def _renamed(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _rotary_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp keeps the two halves that rotary embedding pairs interleaved in each head: undo that."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _pieces(values: NDArray[np.float32], rows: int = 4096) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(values), rows):
        yield np.ascontiguousarray(values[start : start + rows])


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of the bits, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
