"""A conversation whose answers are given again, turn by turn: each question follows the target's own answers.

The token ids of prompt and answer are kept as they went over the wire. What the next question is asked behind is the
text of the answer, as any client of a server would send it back.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.corpus.conversation import Conversation
from eyas.corpus.template import Template

THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What a server said: `ids` with the end token, None where it gives none; `finish` is "stop" or "length"."""

    ids: list[int] | None
    finish: str
    content: str | None = None
    """Where the server has taken reasoning and content apart itself."""
    reasoning: str = ""


class Kit:
    """The target's tokenizer and template, and the ids that end an answer."""

    def __init__(self, tokenizer: Any, template: Template, ends: Iterable[int]) -> None:
        self.tokenizer, self.template, self._ends = tokenizer, template, frozenset(ends)

    def prompt(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """The ids that a server is given. Raises Rejected."""
        ids: list[int] = self.tokenizer.encode(self.template.prompt(messages, tools), add_special_tokens=False)
        return ids

    def message(self, answer: Answer) -> dict[str, Any]:
        """An answer as a message: its reasoning in a field of its own."""
        content, reasoning = answer.content, answer.reasoning
        if content is None:
            ids = [token for token in answer.ids or [] if token not in self._ends]
            content = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            if found := THOUGHT.match(content):
                content, reasoning = content[found.end() :], found[1].strip("\n")
        message = {"role": "assistant", "content": content}
        return {**message, "reasoning_content": reasoning} if reasoning else message


class Talk:
    """A conversation under way. Tool calls, and what tools said, stay as they are in the data."""

    def __init__(self, key: str, source: str, conversation: Conversation, kit: Kit) -> None:
        self.key, self.source, self._kit, self.tools = key, source, kit, conversation.tools
        ends = conversation.messages[-1]["role"] == "assistant"
        self._left = [*conversation.messages, *([] if ends else [{"role": "assistant"}])]
        self._rows: list[dict[str, Any]] = []
        self._asked: list[int] = []
        self.messages: list[dict[str, Any]] = []
        """What was said so far."""

    def ask(self) -> list[int] | None:
        """The ids of the next question; None: there is no further one. Raises Rejected."""
        while self._left:
            message = self._left.pop(0)
            if is_answer(message):
                self._asked = self._kit.prompt(self.messages, self.tools)
                return self._asked
            self.messages.append(message)
        return None

    def give(self, answer: Answer) -> None:
        """The answer to it. An empty one ends the conversation."""
        message = self._kit.message(answer)
        if not message["content"].strip():
            self._left = []
            return
        self.messages.append(message)
        row: dict[str, Any] = {"source": self.source, "finish": answer.finish, "messages": list(self.messages)}
        if self.tools:
            row["tools"] = self.tools
        if answer.ids is not None:
            ids = [*self._asked, *answer.ids]
            row = {"ids": ids, "spans": [[len(self._asked), len(ids)]], **row}
        # Where what was answered before is, token by token, what this question stands behind, one sample holds both.
        if self._rows and self._asked[: len(self._rows[-1].get("ids", []))] == self._rows[-1].get("ids", []):
            before = self._rows.pop()
            if "spans" in row and "spans" in before:
                row["spans"] = [*before["spans"], *row["spans"]]
        self._rows.append(row)

    def rows(self) -> list[dict[str, Any]]:
        """The samples: ids and spans of what was given back, or messages alone where the server gives no ids."""
        return self._rows


def is_answer(message: Mapping[str, Any]) -> bool:
    """Is it given again?"""
    return message["role"] == "assistant" and not message.get("tool_calls")
