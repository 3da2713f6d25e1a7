"""A random model of a few hundred kilobytes, with a real tokenizer and chat template: a target for fast tests.

float32, hidden size 32, 4 heads with 2 key-value heads, a token a byte and three control tokens. The weights are large
enough for greedy answers that vary.
"""

from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL = ["<|pad|>", "<|start|>", "<|end|>"]


def write(folder: Path, architecture: str, layers: int, tied: bool, seed: int) -> None:
    """Write the model into `folder`; architecture: llama, qwen2, qwen3 or mistral."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = write_tokenizer(folder)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=2,
        **({"sliding_window": None} if architecture == "mistral" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_tokenizer(folder: Path) -> int:
    """Write the tokenizer and its chat template; returns the number of tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=CONTROL[0], eos_token=CONTROL[2])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(vocabulary)
