"""The table of `eyas bench`: a line for each server and figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.run.protocol import printable
from eyas.ui.text import duration

HEAD = ("workload", "temp", "at once", "server", "tok/s", "first token", "between", "accept", "ratio", "same")
LEFT = (0, 3)
"""Columns that are no numbers."""


def table(found: Mapping[str, Any]) -> str:
    """What `bench.command.bench` returns, as text."""
    lines = [_server(one) for one in found["servers"]]
    cells = [HEAD, *(cells for row in found["bench"] for cells in _rows(row))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    lines += ["", *(_line(row, widths) for row in cells)]
    positions = [text for row in found["bench"] if (text := _positions(row))]
    lines += ["", "accepted of those reached, by position", *positions] if positions else []
    contexts = [text for row in found["bench"] for text in _contexts(row)]
    lines += ["", "accept length by tokens of the prompt", *contexts] if contexts else []
    lines += ["", *(f"! {printable(note, 2000)}" for note in found["notes"])] if found["notes"] else []
    legend = "first token, between tokens: median / 99th percentile; ratio: tokens a second, 95 % interval"
    return "\n".join([*lines, "", f"{legend}; {duration(found['seconds'])}"])


def _server(one: Mapping[str, Any]) -> str:
    drafts = f", {one['draft_tokens']} draft tokens" if one["draft_tokens"] else ""
    return f"{one['url']}: {printable(one['engine'])} serving {printable(one['model'])}{drafts}"


def _rows(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    head = (printable(row["workload"]), f"{row['temperature']:g}", str(row["concurrency"]))
    rows: list[tuple[str, ...]] = []
    for name in ("plain", "draft"):
        figures = row[name]
        if figures is None:
            continue
        last = ("", "", "")
        if name == "draft":
            accept = f"{row['acceptance']['accept_length']:.2f}" if row["acceptance"] else ""
            last = (accept, _ratio(row["ratio"]), _same(row.get("answers")))
        label = name if name == "plain" or row["draft_tokens"] else "against"
        rate = f"{figures['tokens_per_second']:.1f}"
        rows.append((*head, label, rate, _times(figures["first_token"]), _times(figures["inter_token"]), *last))
        head = ("", "", "")
    return rows


def _times(figure: Mapping[str, float | None]) -> str:
    if figure["p50"] is None or figure["p99"] is None:
        return "–"
    return f"{1000 * figure['p50']:.1f} / {1000 * figure['p99']:.1f} ms"


def _ratio(ratio: Mapping[str, float | None] | None) -> str:
    if ratio is None or ratio["ratio"] is None:
        return ""
    if ratio["low"] is None or ratio["high"] is None:
        return f"{ratio['ratio']:.2f}"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _same(answers: Mapping[str, int] | None) -> str:
    """Answers equal to the first server's; in brackets those that it gave each time, where that is not all."""
    if answers is None:
        return ""
    text = f"{answers['equal']}/{answers['prompts']}"
    return text if answers["steady"] == answers["prompts"] else f"{text} ({answers['steady']} steady)"


def _positions(row: Mapping[str, Any]) -> str:
    if not row["acceptance"]:
        return ""
    shares = [
        f"{at['accepted'] / at['reached']:.0%}" if at["reached"] else "–" for at in row["acceptance"]["by_position"]
    ]
    return f"{_name(row)}: {', '.join(shares)}"


def _contexts(row: Mapping[str, Any]) -> list[str]:
    parts: Sequence[Mapping[str, Any]] = row.get("by_context") or []
    said = [f"{part['least']} to {part['most']}: {part['accept_length']:.2f}" for part in parts if part["rounds"]]
    return [f"{_name(row)}: {', '.join(said)}"] if said else []


def _name(row: Mapping[str, Any]) -> str:
    heat = f", temperature {row['temperature']:g}" if row["temperature"] else ""
    return f"{printable(row['workload'])}, {row['concurrency']} at a time{heat}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:{width}}" if i in LEFT else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
