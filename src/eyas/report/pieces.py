"""Pieces of the page: HTML, and figures in words."""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eyas.report.data import number

NO_PLOTS = "The plots need matplotlib, which is not installed here: pip install 'eyas[report]' and report again."


def escape(value: object) -> str:
    """Text that is shown, whatever it holds."""
    return html.escape(str(value))


def grey(sentence: str) -> str:
    """A sentence where figures are missing."""
    return f'<p class="grey">{escape(sentence)}</p>'


def note(sentence: str) -> str:
    """A sentence that explains figures."""
    return f'<p class="note">{escape(sentence)}</p>'


def pre(text: str) -> str:
    """Text as it stands."""
    return f"<pre>{escape(text)}</pre>"


def section(title: str, content: str) -> str:
    """A heading and what belongs to it."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def pair(left: str, right: str) -> str:
    """Two sections beside each other where there is room."""
    return f'<div class="pair">\n{left}\n{right}\n</div>'


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table that scrolls sideways by itself where the screen is narrow; empty without lines.

    `numbers` are the columns that stand to the right.
    """
    css = ['class="n"' if column in numbers else "" for column in range(len(heads))]
    body = [
        "<tr>" + "".join(f"<td {kind}>{escape(cell)}</td>" for kind, cell in zip(css, line, strict=True)) + "</tr>"
        for line in lines
    ]
    if not body:
        return ""
    head = "".join(f"<th {kind}>{escape(name)}</th>" for kind, name in zip(css, heads, strict=True))
    joined = "\n".join([f"<tr>{head}</tr>", *body]).replace("<td >", "<td>").replace("<th >", "<th>")
    return f'<div class="scroll"><table>\n{joined}\n</table></div>'


def plot(draw: Callable[[Any], str]) -> str:
    """Draw with the plots module, or say in the plot's place what is missing."""
    try:
        from eyas.report import plots
    except ImportError:
        return grey(NO_PLOTS)
    return draw(plots)


def rate(part: object, whole: object) -> float | None:
    """A share; None where it cannot be known."""
    counted, of = number(part), number(whole)
    return counted / of if counted is not None and of else None


def percent(share: float | None) -> str:
    """A share in words."""
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def decimal(value: object) -> str:
    """Two digits behind the point."""
    figure = number(value)
    return "–" if figure is None else f"{figure:.2f}"


def interval(row: dict[str, Any]) -> str:
    """`low` and `high`."""
    low, high = decimal(row.get("low")), decimal(row.get("high"))
    return "–" if "–" in (low, high) else f"{low} to {high}"


def milliseconds(value: object) -> str:
    """Seconds as milliseconds, three digits."""
    figure = number(value)
    return "–" if figure is None else f"{1000 * figure:.3g}" if abs(figure) < 1 else f"{1000 * figure:,.0f}"


def amount(value: float | None) -> str:
    """A count or a rate."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def value(value: object) -> str:
    """Whatever was found."""
    figure = number(value)
    return str("–" if value is None else value) if figure is None else f"{figure:.3g}"
