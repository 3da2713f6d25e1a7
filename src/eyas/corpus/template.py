"""Conversations -> texts with their supervised stretches, both from the chat template's own rendering.

A stretch is where the template itself puts an answer: between its generation tags, or what the rendering with the
answer has beyond the generation prompt. That the prompt is a beginning of it is checked, never assumed; text is never
searched for. A template that renders an earlier turn otherwise than when it was the last one (reasoning dropped,
another end token) gives a text for each such turn: what its server was given at that time, and what it answered.
"""

import contextlib
import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.corpus.conversation import Conversation, Rejected
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
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPENER = re.compile(r"<([\w:]*(?:think|reason)\w*)>\s*\Z", re.IGNORECASE)
"""What opens reasoning at the end of a generation prompt."""
THOUGHTS = re.compile(r"reasoning_content|\bmessage(\.|\[.)(thinking|reasoning)\b|(['\"])thinking\3")
"""A template that reads reasoning from a field of its own."""
INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
NOT_PREFIX = "the template renders the answer otherwise than its generation prompt begins it"
NO_REASONING = "the generation prompt opens reasoning, the answer has none"
REFUSED = "the chat template refuses it"
NO_ANSWER = "no answer in it"
NO_TAGGED = "the template's generation tags hold no text"
Messages = Sequence[Mapping[str, Any]]
Text = str | Rejected


@dataclass(frozen=True)
class Rendered:
    """A text as the model sees it. `spans`: where an answer begins and ends in it, each [start, end), in characters."""

    text: str
    spans: tuple[tuple[int, int], ...]


class Template:
    """A tokenizer's chat template, or another one, with its variables.

    Raises UserError: there is none; `kwargs` names what is not a variable of the template.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], text: str | None = None) -> None:
        taken = sorted(OURS & kwargs.keys())
        if taken:
            raise UserError(f"target.chat_template_kwargs: {taken[0]} is set by eyas itself; take it out")
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs)
        self._tools = self._kwargs.pop("tools", None)  # of all conversations that have none of their own
        if text is not None:
            self._kwargs["chat_template"] = text
        try:
            self.text: str = tokenizer.get_chat_template(text)
        except Exception as error:
            raise UserError(
                f"{tokenizer.name_or_path}: no chat template ({line(error)}); give a file of one"
            ) from error
        self.tagged = bool(TAGS.search(self.text))
        self._takes_thoughts = bool(THOUGHTS.search(self.text))
        self._as_text = self._wants_text()

    def render(self, messages: Messages, tools: Any, prompt: bool) -> str:
        """The text of messages, with the generation prompt behind them or without. Raises Rejected."""
        try:
            return self._apply([messages], tools, prompt)[0]
        except Exception as error:
            raise Rejected(REFUSED, line(error)) from error

    def prompt(self, messages: Messages, tools: Any) -> str:
        """What a server is given to be answered: messages and the generation prompt. Raises Rejected."""
        return self.render(self._apart(messages), tools, True)

    def __call__(self, conversations: Sequence[Conversation]) -> list[list[Rendered] | Rejected]:
        """Each one's texts, at least one, each with at least one stretch; or why there are none."""
        conversations = [dataclasses.replace(one, messages=self._apart(one.messages)) for one in conversations]
        wanted = []
        if not self.tagged:
            for conversation in conversations:
                for number in conversation.answers:
                    wanted.append(_Wanted(conversation.messages[:number], conversation.tools, True))
                    wanted.append(_Wanted(conversation.messages[: number + 1], conversation.tools, False))
        texts = iter(self._render_all(wanted))
        found: list[list[Rendered] | Rejected] = []
        for conversation in conversations:
            pairs = [] if self.tagged else [(next(texts), next(texts)) for _ in conversation.answers]
            try:
                if not conversation.answers:
                    raise Rejected(NO_ANSWER)
                found.append(self._by_tags(conversation) if self.tagged else self._by_prefixes(conversation, pairs))
            except Rejected as reason:
                found.append(reason)
        return found

    def _apart(self, messages: Messages) -> list[dict[str, Any]]:
        """Reasoning at the head of an answer's content moved into its field, where the template has one: no opener
        comes twice."""
        if not self._takes_thoughts:
            return [dict(message) for message in messages]
        return [
            _with_thought_apart(message) if message["role"] == "assistant" else dict(message) for message in messages
        ]

    def _apply(self, chats: Sequence[Messages], tools: Any, prompt: bool) -> list[str]:
        given = [_with_text_arguments(chat) for chat in chats] if self._as_text else chats
        rendered: list[str] = self._tokenizer.apply_chat_template(
            given, tools=tools or self._tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
        )
        return rendered

    def _render_all(self, wanted: Sequence["_Wanted"]) -> list[Text]:
        """In one call where that works: each has its price."""
        texts: dict[int, Text] = {}
        for prompt in (True, False):
            plain = [i for i, one in enumerate(wanted) if one.prompt is prompt and one.tools is None]
            # What fails for all is tried one by one, below.
            with contextlib.suppress(Exception):
                texts |= zip(plain, self._apply([wanted[i].messages for i in plain], None, prompt), strict=True)
        for i, one in enumerate(wanted):
            if i not in texts:
                try:
                    texts[i] = self.render(one.messages, one.tools, one.prompt)
                except Rejected as reason:
                    texts[i] = reason
        return [texts[i] for i in range(len(wanted))]

    def _by_tags(self, conversation: Conversation) -> list[Rendered]:
        from transformers.utils.chat_template_utils import render_jinja_template

        tools: Any = conversation.tools or self._tools
        messages = conversation.messages[: conversation.answers[-1] + 1]
        if self._as_text:
            messages = _with_text_arguments(messages)
        variables = {**self._tokenizer.special_tokens_map, **self._kwargs, "chat_template": self.text}
        try:
            made: Any = render_jinja_template([messages], tools=tools, return_assistant_tokens_mask=True, **variables)
        except Exception as error:
            raise Rejected(REFUSED, line(error)) from error
        (text,), (stretches,) = made
        found = tuple((start, end) for start, end in stretches if end > start)
        if not found:
            raise Rejected(NO_TAGGED)
        return [Rendered(text, found)]

    def _by_prefixes(self, conversation: Conversation, pairs: Sequence[tuple[Text, Text]]) -> list[Rendered]:
        made: list[Rendered] = []
        for number, (prompt, whole) in zip(conversation.answers, pairs, strict=True):
            if isinstance(prompt, Rejected):
                raise prompt
            if isinstance(whole, Rejected):
                raise whole
            text = self._answered(conversation, number, prompt, whole)
            span = (len(prompt), len(text))
            if made and prompt.startswith(made[-1].text):
                made[-1] = Rendered(text, (*made[-1].spans, span))
            else:
                made.append(Rendered(text, (span,)))
        return made

    def _answered(self, conversation: Conversation, number: int, prompt: str, whole: str) -> str:
        """The prompt and the answer of one turn, `whole` being their rendering. Raises Rejected."""
        message = conversation.messages[number]
        opener = OPENER.search(prompt)
        head = prompt[: opener.start()] if opener else prompt
        if not whole.startswith(head):
            whole = head + self._alone(conversation, number, prompt, whole)
        if opener:
            thought = message.get("reasoning_content", "").strip()
            if not whole.startswith(prompt) or not whole[len(prompt) :].lstrip().startswith(thought):
                return _reopened(prompt, whole, opener, message)
        return whole

    def _alone(self, conversation: Conversation, number: int, prompt: str, whole: str) -> str:
        """An answer that changes how turns before it are shown (reasoning between tool calls), behind the head.

        It is taken from where none of them stands between it and the question, and must be the very end of `whole`.
        Raises Rejected.
        """
        questions = (i for i in range(number) if conversation.messages[i]["role"] == "user")
        asked = max(questions, default=number - 1)
        before = conversation.messages[: asked + 1]
        short = self.render(before, conversation.tools, True)
        alone = self.render([*before, conversation.messages[number]], conversation.tools, False)
        opener = OPENER.search(short)
        answer = alone[opener.start() if opener else len(short) :]
        if asked + 1 == number or not alone.startswith(short[: len(alone) - len(answer)]) or not whole.endswith(answer):
            raise Rejected(NOT_PREFIX, _difference(prompt, whole))
        return answer

    def _wants_text(self) -> bool:
        """Does the template want tool arguments as JSON text? Told by what it does with an object."""
        call: Any = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}
        messages: Messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        self._as_text = False
        for self._as_text in (False, True):
            with contextlib.suppress(Rejected):
                self.render(messages, None, False)
                return self._as_text
        return False


@dataclass(frozen=True)
class _Wanted:
    """A rendering that is asked for."""

    messages: Messages
    tools: Any
    prompt: bool


def _reopened(prompt: str, whole: str, opener: re.Match[str], message: Mapping[str, Any]) -> str:
    """The text of an answer whose reasoning the generation prompt opens and the template drops from every answer.

    What such a model says after `<think>` is its reasoning, the closing tag and the content: put back from the message
    itself; all else is the template's. Raises Rejected: the message has no reasoning, or the template shows another
    content.
    """
    start, close = f"<{opener[1]}>", f"</{opener[1]}>"
    content: str = message["content"].lstrip()
    rest = whole[opener.start() :]
    if empty := re.match(rf"{start}(\s*){close}(\s*)", rest):
        rest = rest[empty.end() :]
    thought: str = message.get("reasoning_content", "")
    if thought:
        before, behind = ("\n" if "\n" in empty[1] else "", empty[2]) if empty else ("\n", "\n\n")
        said, answer = thought.strip("\n") + before + close + behind, content
    elif content.startswith(start) and close in content:
        said, answer = content.removeprefix(start).lstrip("\n").split(close, 1)
        said, answer = said + close + answer[: len(answer) - len(answer.lstrip())], answer.lstrip()
    else:
        raise Rejected(NO_REASONING)
    for shown in (answer, answer.strip()):
        if rest.lstrip().startswith(shown):
            return prompt + said + rest.lstrip()
    raise Rejected(NOT_PREFIX, _difference(prompt, whole))


def _with_thought_apart(message: Mapping[str, Any]) -> dict[str, Any]:
    found = INLINE.match(message["content"])
    if found is None or "reasoning_content" in message:
        return dict(message)
    return {**message, "content": message["content"][found.end() :], "reasoning_content": found[1].strip("\n")}


def _with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
    changed = copy.deepcopy([dict(message) for message in messages])
    for message in changed:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return changed


def _difference(prompt: str, whole: str) -> str:
    """Where two texts part, in words."""
    at = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    behind, one, other = (
        repr(text) for text in (whole[max(0, at - 30) : at], prompt[at : at + 30], whole[at : at + 30])
    )
    return f"behind {behind} the prompt has {one}, with the answer {other}"


def line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__
