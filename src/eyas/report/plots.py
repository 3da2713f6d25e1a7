"""The report's plots: matplotlib figures as small inline SVG.

Drawn at the width of a phone, so that letters stay readable there; text stays text; colours are the page's own CSS
variables, so that they follow its light or dark scheme. Same data, same bytes.
"""

import io
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Stand-ins that become CSS variables (page.py); the series colours are Okabe and Ito's, told apart by any eye.
INK, GRID, PREDICTED, DECODED, THIRD, FOURTH = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = {INK: "ink", GRID: "line", PREDICTED: "c1", DECODED: "c2", THIRD: "c3", FOURTH: "c4"}
SERIES = (
    (PREDICTED, "o", "-"),
    (DECODED, "s", "--"),
    (THIRD, "^", "-."),
    (FOURTH, "D", ":"),
)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
WIDTH, HEIGHT = 4.9, 3.0
PAGE = "svg { font-family: system-ui, sans-serif; background: var(--back); }"
"""Style of a plot that stands in no page."""

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would tell users about its font cache


def acceptance(positions: Sequence[int], rates: dict[str, Sequence[float | None]]) -> str:
    """Acceptance by draft position: keys `predicted` and `decoded`, conditional; the same with ` joint`."""

    def draw(axes: Axes) -> None:
        for side, (name, colour) in enumerate((("predicted", PREDICTED), ("decoded", DECODED))):
            heights = [100 * (rate or 0.0) for rate in rates[name]]
            axes.bar([p + 0.4 * side - 0.2 for p in positions], heights, 0.36, color=colour, label=f"{name}")
        for name, marker, dashes in (("predicted", "o", "-"), ("decoded", "x", ":")):
            heights = [100 * (rate or 0.0) for rate in rates[f"{name} joint"]]
            line = axes.plot(positions, heights, dashes, color=INK, linewidth=1, label=f"{name}, joint")[0]
            line.set(marker=marker, markersize=6, markerfacecolor="none")
        axes.set_ylim(0, 100)
        axes.set_xticks(list(positions))
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_xlabel("draft position")
        _legend(axes)

    return _svg("acceptance", draw)


def loss(tokens: Sequence[float], values: Sequence[float]) -> str:
    """Training loss over training tokens."""

    def draw(axes: Axes) -> None:
        axes.plot(tokens, values, color=PREDICTED)
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("training tokens")
        axes.set_ylabel("loss")

    return _svg("loss", draw)


def length(steps: Sequence[float], values: Sequence[float]) -> str:
    """Accept length on held-out answers over optimizer steps."""

    def draw(axes: Axes) -> None:
        axes.plot(steps, values, color=DECODED, marker="s")
        axes.set_ylabel("tokens a verify step")
        _step_axis(axes)

    return _svg("length", draw)


def rates(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """Share of all verify steps that accept this far, over optimizer steps: a curve for each draft position."""

    def draw(axes: Axes) -> None:
        for position, (steps, values) in enumerate(curves, 1):
            colour, marker, line = SERIES[(position - 1) % len(SERIES)]
            label = f"position {position}"
            axes.plot(steps, [100 * v for v in values], color=colour, marker=marker, linestyle=line, label=label)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_ylim(bottom=0)
        _step_axis(axes)
        _legend(axes, 3)

    return _svg("rates", draw)


def speedups(series: dict[str, Sequence[tuple[float, float, float | None, float | None]]]) -> str:
    """Speed-up over requests at a time: points (requests, ratio, low, high) by name; below the line drafting loses."""
    places = sorted({point[0] for points in series.values() for point in points})

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=":", label="break-even")
        for number, (name, points) in enumerate(series.items()):
            colour, marker, line = SERIES[number % len(SERIES)]
            # A few percent aside, so that intervals at one place do not hide each other.
            across = [at * 1.03**number for at, *_ in points]
            middles = [ratio for _, ratio, _, _ in points]
            below = [max(0.0, ratio - (ratio if low is None else low)) for _, ratio, low, _ in points]
            above = [max(0.0, (ratio if high is None else high) - ratio) for _, ratio, _, high in points]
            short = name if len(name) < 28 else name[:26] + "…"
            axes.errorbar(
                across, middles, (below, above), color=colour, marker=marker, linestyle=line, capsize=3, label=short
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xlim(places[0] / 1.3, places[-1] * 1.4)
        axes.minorticks_off()
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("times as fast as without")
        _legend(axes)

    return _svg("speedups " + " ".join(series), draw, HEIGHT + 0.2 * (len(series) // 2))


def trials(rows: Sequence[tuple[str, float, float | None, float | None, bool]]) -> str:
    """Settings against the default, the first on top: (name, ratio, low, high, chosen)."""

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
        for row, (_, ratio, low, high, chosen) in enumerate(rows):
            spread = [[max(0.0, ratio - (low or ratio))], [max(0.0, (high or ratio) - ratio)]]
            colour, marker = (DECODED, "s") if chosen else (PREDICTED, "o")
            axes.errorbar([ratio], [row], xerr=spread, color=colour, marker=marker, linestyle="none", capsize=3)
        # Where names are long, their ends differ.
        axes.set_yticks(range(len(rows)), [name if len(name) < 34 else "…" + name[-32:] for name, *_ in rows])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("times as fast as the default")

    return _svg("trials", draw, 0.8 + 0.3 * len(rows))


def timeline(bars: Sequence[tuple[str, float, float, bool, bool]]) -> str:
    """Steps as bars (name, start, end, reused, failed) in seconds since the run started."""
    last = max(end for _, _, end, _, _ in bars)
    scale, unit = (3600, "hours") if last > 7200 else (60, "minutes") if last > 120 else (1, "seconds")

    def draw(axes: Axes) -> None:
        for row, (_, start, end, reused, failed) in enumerate(bars):
            width = max(end - start, last / (40 if reused else 200)) / scale
            colour = DECODED if failed else PREDICTED
            face = "none" if reused else colour
            axes.barh(row, width, 0.62, start / scale, color=face, edgecolor=colour, hatch="////" if reused else None)
            if reused:
                axes.annotate("reused", (start / scale + width, row), (4, 0), textcoords="offset points", va="center")
        names = [name if len(name) < 18 else name[:16] + "…" for name, *_ in bars]
        names = [name + ": failed" * bar[4] for name, bar in zip(names, bars, strict=True)]
        axes.set_yticks(range(len(bars)), names)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, last * 1.02 / scale if last > 0 else 1)
        axes.set_xlabel(f"{unit} since the start")

    return _svg("timeline", draw, 0.8 + 0.24 * len(bars))


def standalone(svg: str) -> str:
    """A plot as a file of its own, which follows the reader's light or dark scheme too."""
    style = resources.files("eyas.report").joinpath("style.css").read_text(encoding="utf-8")
    variables = style[: style.index("* {")]
    head, _, body = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">\n<style>{variables}{PAGE}</style>{body}\n'


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.set_xlabel("optimizer step")


def _legend(axes: Axes, columns: int = 2) -> None:
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=columns, fontsize=9, columnspacing=1.2, handlelength=1.8
    )


def _short(value: float, _: Any = None) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _svg(salt: str, draw: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """Draw into one pair of axes; return an `<svg>` element without ids that others could share."""
    style: Any = {**STYLE, "svg.hashsalt": salt}  # matplotlib's own annotation lists every key, and changes
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the measuring font lacks; the browser has them
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _slim(text.getvalue())


def _slim(text: str) -> str:
    """Cut what an inline SVG does not need (and every address in it); colours become variables, fonts the page's."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href").replace("'DejaVu Sans'", "inherit")
    text = re.sub(r'(<svg [^>]*?)height="[^"]*" ', r"\1", text)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" ', r"\1", text)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\s*\n\s*", "\n", text).strip()
