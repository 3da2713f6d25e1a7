"""Prompts -> token ids, with the target's own chat template and tokenizer: exactly what its server would be asked."""

from collections.abc import Mapping
from typing import Any

from eyas.corpus.conversation import Rejected
from eyas.corpus.read import Row
from eyas.corpus.template import Template
from eyas.corpus.work import load_tokenizer
from eyas.engines.target import TargetInfo
from eyas.errors import UserError


class Unrenderable(UserError):  # noqa: N818
    """The chat template refuses a row, for `reason`."""

    def __init__(self, row: Row, rejected: Rejected) -> None:
        super().__init__(f"{row.source}: the target's chat template refuses this row ({rejected.detail})")
        self.reason, self.detail = rejected.reason, rejected.detail


class Renderer:
    """The target's tokenizer, ready to turn conversations into ids.

    Raises UserError: the tokenizer cannot be loaded; `kwargs` (target.chat_template_kwargs) names what is not a
    variable of the template.
    """

    def __init__(self, info: TargetInfo, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = load_tokenizer(info.folder)
        self._template = Template(self._tokenizer, kwargs)
        self._info, self._kwargs = info, dict(kwargs)

    def __call__(self, row: Row) -> list[int]:
        """The ids of a conversation up to where the answer begins.

        Raises Unrenderable: the template refuses the row. UserError: an id lies outside the target's vocabulary.
        """
        ids = row.ids
        if ids is None:
            try:
                text = self._template.prompt(row.messages, row.tools)
            except Rejected as reason:
                raise Unrenderable(row, reason) from reason
            ids = self._tokenizer.encode(text, add_special_tokens=False)
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
        text = "\n".join(str(message.get("content") or "") for message in row.messages)
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
