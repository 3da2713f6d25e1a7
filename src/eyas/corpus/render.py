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


def _line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__
