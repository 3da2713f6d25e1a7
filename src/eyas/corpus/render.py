"""Prompts -> token ids, with the target's own chat template and tokenizer: exactly what its server would be asked."""

from collections.abc import Mapping
from typing import Any

from eyas.corpus.read import Row
from eyas.engines.target import TargetInfo
from eyas.errors import UserError

OURS = frozenset(
    {
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of apply_chat_template that are no variables of a template."""


class Renderer:
    """The target's tokenizer, ready to turn conversations into ids.

    Raises UserError: the tokenizer cannot be loaded; `kwargs` (target.chat_template_kwargs) names what is not a
    variable of the template.
    """

    def __init__(self, info: TargetInfo, kwargs: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        taken = sorted(OURS & kwargs.keys())
        if taken:
            raise UserError(f"target.chat_template_kwargs: {taken[0]} is set by eyas itself; take it out")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(info.folder, local_files_only=True)
        except Exception as error:
            raise UserError(f"{info.folder}: the tokenizer cannot be loaded ({_line(error)})") from error
        self._info = info
        self._kwargs = dict(kwargs)

    def __call__(self, row: Row) -> list[int]:
        """The ids of a conversation up to where the answer begins.

        Raises UserError: the template refuses the row, or an id lies outside the target's vocabulary.
        """
        try:
            ids: Any = self._tokenizer.apply_chat_template(
                row.messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self._kwargs
            )
        except Exception as error:
            raise UserError(f"{row.source}: the target's chat template refuses this row ({_line(error)})") from error
        outside = [token for token in ids if not 0 <= token < self._info.vocab_size]
        if outside:
            raise UserError(
                f"{row.source}: token id {outside[0]} is outside the target's vocabulary of {self._info.vocab_size}; "
                f"the tokenizer in {self._info.folder} belongs to another model"
            )
        return [int(token) for token in ids]

    def otherwise(self, row: Row) -> dict[str, list[int]]:
        """The ids of a conversation as a client may send it by mistake, by what the mistake is."""
        render, template = self._tokenizer.apply_chat_template, str(self._tokenizer.chat_template)
        asked = {"tokenize": True, "return_dict": False, "add_generation_prompt": True, **self._kwargs}
        text = "\n".join(message["content"] for message in row.messages)
        found = {
            "the bare text, without the chat template": self._tokenizer(text)["input_ids"],
            "no generation prompt": render(row.messages, **{**asked, "add_generation_prompt": False}),
        }
        if "enable_thinking" in template:
            thinking = not self._kwargs.get("enable_thinking", True)
            label = f"enable_thinking {str(thinking).lower()}"
            found[label] = render(row.messages, **{**asked, "enable_thinking": thinking})
        own, begin = self(row), self._tokenizer.bos_token_id
        if begin is not None and own[:1] == [begin]:
            found["the token that begins a text twice"] = [begin, *own]
        return {label: [int(token) for token in ids] for label, ids in found.items() if ids != own and len(ids) > 1}


def _line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__
