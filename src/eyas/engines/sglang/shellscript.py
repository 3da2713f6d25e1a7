"""Reads the plain part of the shell's language: enough for scripts that set variables and start a server.

Statements, quotes, comments, line continuations, assignments, exports, arrays and `$NAME`, `${NAME:-default}` are
followed; a construct that is not (`if`, loops, `$(command)`) is refused where it matters, never guessed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eyas.errors import UserError

CONTROL = ("if", "for", "while", "until", "case", "select", "function", "then", "else", "elif", "do", "{", "(")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(")
_REDIRECTION = re.compile(r"\d*(>>|>&|>|<)|&>>?")


@dataclass
class Statement:
    """A simple command."""

    line: int
    words: list[str]
    """Expanded, without assignments and redirections."""
    assigned: dict[str, str]
    """Assignments that stand before the command and are its environment only."""


@dataclass
class Script:
    """What reading a script gave."""

    statements: list[Statement] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    control: tuple[int, str] | None = None
    """The first line that branches or loops, and its word."""
    arguments: bool = False
    """Whether it hands on its own arguments, which are not known here."""

    @property
    def environment(self) -> dict[str, str]:
        """Exported variables that the script sets."""
        return {name: self.variables[name] for name in sorted(self.exported) if name in self.variables}


class Unknown(str):
    """A word that cannot be evaluated here; its text says why."""

    __slots__ = ()


def read(text: str, environment: Mapping[str, str], where: str) -> Script:
    """Read a script. Raises UserError: a quote is not closed."""
    return _Reader(text, environment, where).run()


class _Reader:
    def __init__(self, text: str, environment: Mapping[str, str], where: str) -> None:
        self._text = re.sub(r"\\\r?\n", "\x00", text + "\n\n").replace("\r\n", "\n")
        self._at, self._where, self._environment = 0, where, environment
        self._script = Script()

    def run(self) -> Script:
        words: list[tuple[str, bool]] = []
        first = self._line()
        while self._at < len(self._text):
            if self._skip_blanks():
                continue
            sign = self._text[self._at]
            if sign in "\n;|&":
                if redirection := _REDIRECTION.match(self._text, self._at) if sign == "&" else None:
                    self._redirect(redirection)
                    continue
                self._at += 1
                self._statement(first, words)
                words = []
                continue
            if not words:
                first = self._line()
            if redirection := _REDIRECTION.match(self._text, self._at):
                self._redirect(redirection)
            elif array := _ARRAY.match(self._text, self._at):
                self._array(array)
            else:
                words += self._word()
        self._statement(first, words)
        return self._script

    def _line(self) -> int:
        before = self._text[: self._at]
        return before.count("\n") + before.count("\x00") + 1

    def _skip_blanks(self) -> bool:
        """Step over a blank, a continuation or a comment; whether there was one."""
        if self._text[self._at] in " \t\x00":
            self._at += 1
            return True
        if self._text[self._at] == "#":
            self._at = self._text.index("\n", self._at)
            return True
        return False

    def _redirect(self, found: re.Match[str]) -> None:
        self._at = found.end()
        while self._text[self._at] in " \t\x00":
            self._at += 1
        if self._text[self._at] not in "\n;|":
            self._word()

    def _array(self, found: re.Match[str]) -> None:
        self._at = found.end()
        items: list[tuple[str, bool]] = []
        while self._text[self._at] != ")":
            if self._text[self._at] == "\n":
                self._at += 1
            elif not self._skip_blanks():
                items += self._word()
            if self._at >= len(self._text) - 1:
                raise UserError(f"{self._where} line {self._line()}: a bracket ( is not closed")
        self._at += 1
        old = self._script.arrays.get(found[1], []) if found[2] else []
        self._script.arrays[found[1]] = old + [word for word, _ in items]

    def _word(self) -> list[tuple[str, bool]]:
        """The next word, expanded: none, one or several; each with whether any of it was quoted."""
        parts: list[tuple[str, bool]] = []
        unknown: Unknown | None = None
        begun = self._at
        while (sign := self._text[self._at]) not in " \t\n;|&\x00" and not (sign in "()<>" and self._at > begun):
            if sign == "'":
                end = self._closing("'")
                parts.append((self._text[self._at + 1 : end], True))
                self._at = end + 1
            elif sign == '"':
                items = self._quoted()
                if len(items) != 1:
                    # "${ARRAY[@]}": as many words as it has items.
                    return [(item, True) for item in items]
                parts.append((items[0], True))
                unknown = unknown or (items[0] if isinstance(items[0], Unknown) else None)
            elif sign == "\\":
                parts.append((self._text[self._at + 1], True))
                self._at += 2
            elif sign in "$`":
                items = self._expansion()
                if len(items) == 1 and isinstance(items[0], Unknown):
                    unknown = unknown or items[0]
                whole = " ".join(items)
                parts.append((whole, False))
            else:
                parts.append((sign, sign in "()"))
                self._at += 1
        if unknown is not None:
            name = _ASSIGNMENT.match(self._text, begun)
            return [(Unknown(f"{name[0]}{unknown}") if name else unknown, True)]
        return list(_split(parts, bool(_ASSIGNMENT.match(self._text, begun))))

    def _closing(self, quote: str) -> int:
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise UserError(f"{self._where} line {self._line()}: a quote {quote} is not closed")
        return end

    def _closing_brace(self) -> int:
        """Where the `${` here ends; others may stand inside."""
        depth = 0
        for found in re.finditer(r"\\.|\$\{|\}", self._text[self._at :]):
            depth += {"${": 1, "}": -1}.get(found[0], 0)
            if depth == 0:
                return self._at + found.start()
        raise UserError(f"{self._where} line {self._line()}: a bracket {{ is not closed")

    def _quoted(self) -> list[str]:
        """A double-quoted string; several words if it is an array's `"${A[@]}"`, none if that is empty."""
        opened, text, unknown = self._line(), "", None
        self._at += 1
        while (sign := self._text[self._at]) != '"':
            if sign == "\\" and self._text[self._at + 1] in '"\\$`':
                text += self._text[self._at + 1]
                self._at += 2
            elif sign == "\x00":
                self._at += 1
            elif sign in "$`":
                items = self._expansion()
                if len(items) == 1 and isinstance(items[0], Unknown):
                    unknown = items[0]
                elif len(items) != 1 and not text and self._text[self._at] == '"':
                    self._at += 1
                    return items
                text += " ".join(items)
            else:
                text += sign
                self._at += 1
            if self._at >= len(self._text):
                raise UserError(f'{self._where} line {opened}: a quote " is not closed')
        self._at += 1
        return [unknown or text]

    def _expansion(self) -> list[str]:
        """What `$…` stands for."""
        line = self._line()
        if self._text.startswith(("$(", "`"), self._at):
            close = ")" if self._text[self._at] == "$" else "`"
            end = self._closing(close)
            said = self._text[self._at : end + 1]
            self._at = end + 1
            return [Unknown(f"{self._where} line {line}: {said} cannot be evaluated here; write what it gives")]
        if self._text.startswith("${", self._at):
            end = self._closing_brace()
            inner = self._text[self._at + 2 : end]
            self._at = end + 1
            return self._braced(inner, line)
        if found := _NAME.match(self._text, self._at + 1):
            self._at = found.end()
            return [self._value(found[0], line)]
        special = self._text[self._at + 1]
        if special in "@*":
            self._script.arguments = True
            self._at += 2
            return []
        if special.isdigit() or special in "?#!$-":
            self._at += 2
            return [
                Unknown(f"{self._where} line {line}: ${special} is only known when the script runs; write its value")
            ]
        self._at += 1
        return ["$"]

    def _braced(self, inner: str, line: int) -> list[str]:
        if inner in ("@", "*"):
            self._script.arguments = True
            return []
        found = re.fullmatch(r"([A-Za-z_]\w*|\d+)(\[[@*]\])?(?:(:?[-=?+])(.*))?", inner, re.DOTALL)
        if found is None:
            return [Unknown(f"{self._where} line {line}: ${{{inner}}} cannot be evaluated here; write what it gives")]
        name, array, sign, other = found.groups()
        if array:
            return list(self._script.arrays.get(name, []))
        value = self._value(name, line)
        known = not isinstance(value, Unknown) and not (sign and sign.startswith(":") and not value)
        if sign and sign[-1] == "+":
            return [_Reader(other, self._environment, self._where).expanded(self._script) if known else ""]
        if known or not sign or sign[-1] == "?":
            return [value]
        return [_Reader(other, self._environment, self._where).expanded(self._script)]

    def expanded(self, script: Script) -> str:
        """All of the text as one double-quoted string."""
        self._script, self._at = script, 0
        self._text = '"' + self._text.rstrip("\n").strip('"') + '"\n'
        items = self._quoted()
        return items[0] if len(items) == 1 else " ".join(items)  # Joined, one that is Unknown would be a plain string.

    def _value(self, name: str, line: int) -> str:
        if name in self._script.variables:
            return self._script.variables[name]
        if name in self._script.arrays:
            return self._script.arrays[name][0] if self._script.arrays[name] else ""
        if name in self._environment:
            return self._environment[name]
        return Unknown(f"{self._where} line {line}: ${name} is not set in the script; set it there, or in your shell")

    def _statement(self, line: int, words: list[tuple[str, bool]]) -> None:
        """Take in a command that is complete."""
        if not words:
            return
        if not words[0][1] and words[0][0] in CONTROL and self._script.control is None:
            self._script.control = (line, words[0][0])
        assigned: dict[str, str] = {}
        texts = [word for word, _ in words]
        while texts and (found := _ASSIGNMENT.match(texts[0])):
            rest = texts[0][found.end() :]
            value: str = Unknown(rest) if isinstance(texts[0], Unknown) else rest
            old = self._script.variables.get(found[1], "") if found[2] else ""
            assigned[found[1]] = value if isinstance(value, Unknown) else old + value
            texts = texts[1:]
        if not texts:
            self._script.variables |= assigned
            return
        if texts[0] in ("export", "declare", "local", "readonly", "typeset"):
            self._export(texts)
            return
        if texts[0] == "unset":
            for name in texts[1:]:
                self._script.variables.pop(name, None)
        if texts[0] == "set" and texts[1:] == ["-a"]:
            self._script.exported |= set(self._script.variables)
        self._script.statements.append(Statement(line, texts, assigned))

    def _export(self, texts: list[str]) -> None:
        exports = texts[0] == "export" or "-x" in texts
        for text in texts[1:]:
            found = _ASSIGNMENT.match(text)
            if found:
                rest = text[found.end() :]
                self._script.variables[found[1]] = Unknown(rest) if isinstance(text, Unknown) else rest
            name = found[1] if found else text
            if exports and not name.startswith("-"):
                self._script.exported.add(name)


def _split(parts: list[tuple[str, bool]], whole: bool) -> Iterator[tuple[str, bool]]:
    """Words out of the parts of one: what was not quoted is split at blanks, except in assignments (`whole`)."""
    quoted = any(one for _, one in parts)
    if whole or (quoted and all(one or " " not in text for text, one in parts)):
        yield "".join(text for text, _ in parts), quoted
        return
    words, open_ = [""], False
    for text, one in parts:
        if one:
            words[-1] += text
            open_ = True
            continue
        pieces = re.split(r"[ \t\n]+", text)
        words[-1] += pieces[0]
        words += pieces[1:]
        open_ = open_ and len(pieces) == 1
    yield from ((word, quoted) for word in words if word or open_)
