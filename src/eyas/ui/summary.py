"""The closing summary: what came out, whether to deploy it, and where everything is."""

from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import number, read_json
from eyas.ui.text import duration


def summary(folder: Path, seconds: float) -> str:
    """A run's outcome in a screenful, from verdict.json and timeline.json; what is missing is left out."""
    verdict = _object(folder / "verdict.json")
    steps = _dict(_dict(_object(folder / "timeline.json").get("otherData")).get("steps"))
    lines = ["", _headline(folder.name, verdict, steps, seconds), *_figures(verdict)]
    reasons = verdict.get("reasons")
    if isinstance(reasons, list) and reasons:
        lines += ["Why", *(f"  - {reason}" for reason in reasons)]
    lines += [*_serving(verdict), *_places(folder, steps), *_times(verdict, steps), *_overlap(folder)]
    return "\n".join(lines)


def acceptance(found: dict[str, Any]) -> str:
    """An acceptance result (docs/seams.md) for people."""
    lines = [
        f"Accept length  {_number(found.get('accept_length'))}, the bonus token included, "
        f"{found.get('draft_tokens', '?')} draft tokens a step, {found.get('rounds', '?')} steps"
    ]
    rows = [(row.get("position"), row.get("reached"), row.get("accepted")) for row in _rows(found.get("by_position"))]
    lines += [f"  position {p}: {_share(accepted, reached)} of {reached} accepted" for p, reached, accepted in rows]
    looping = _dict(found.get("looping"))
    if looping.get("rows"):
        lines.append(f"Looping rows   {looping['rows']}, left out above; alone {_number(looping.get('accept_length'))}")
    return "\n".join(lines)


def _headline(name: str, verdict: dict[str, Any], steps: dict[str, Any], seconds: float) -> str:
    failed = [step for step, about in steps.items() if _dict(about).get("state") == "failed"]
    if failed:
        return f"{name}: no verdict, {' and '.join(failed)} failed after {duration(seconds)}"
    deploy = _dict(verdict.get("deploy"))
    answer = {
        "yes": "deploy the draft",
        "up_to": f"deploy the draft for up to {deploy.get('max_concurrency')} requests at once",
        "no": "do not deploy the draft",
    }.get(str(deploy.get("verdict")), "finished, without a verdict")
    return f"{name}: {answer} (after {duration(seconds)})"


def _figures(verdict: dict[str, Any]) -> list[str]:
    lines = []
    length = _dict(verdict.get("accept_length"))
    if length:
        predicted, served = _number(length.get("predicted")), _number(length.get("served"))
        lines.append(
            f"Accept length   {served} decoded, {predicted} predicted, {length.get('draft_tokens', '?')} draft tokens"
        )
        rows = _rows(length.get("by_position"))
        if rows:
            lines.append("  position    reached    decoded  predicted")
        for row in rows:
            decoded = _share(row.get("accepted_served"), row.get("reached"))
            replayed = _share(row.get("accepted_predicted"), row.get("reached_predicted"))
            lines.append(
                f"  {row.get('position', '?')!s:>8} {row.get('reached', '–')!s:>10} {decoded:>10} {replayed:>10}"
            )
        looping = _dict(length.get("looping"))
        if looping.get("rows"):
            lines.append(f"  left out: {looping['rows']} looping rows, {_number(looping.get('served'))} decoded")
    for row in _rows(verdict.get("speedup")):
        interval = f"{_number(row.get('low'))} to {_number(row.get('high'))}"
        at = f"{row.get('concurrency', '?')} request{'' if row.get('concurrency') == 1 else 's'} at once"
        needed = f"; pays from {_number(row['break_even'])} tokens a step" if row.get("break_even") else ""
        lines.append(f"Speed-up        {_number(row.get('ratio'))} times, interval {interval}, with {at}{needed}")
    if verdict.get("lossless") is not None:
        lines.append(f"Lossless        {'yes' if verdict['lossless'] is True else 'NO'}")
    return lines


def _serving(verdict: dict[str, Any]) -> list[str]:
    """How many tokens to draft, and the command to serve with; on one line each, to be copied."""
    best = [
        f"{row.get('draft_tokens', '?')} ({_number(row.get('speedup'))} times) with {row.get('concurrency', '?')}"
        for row in _rows(_dict(verdict.get("sweep")).get("best"))
    ]
    lines = [f"Draft tokens    best {', '.join(best)} at once"] if best else []
    command, answer = verdict.get("launch"), _dict(verdict.get("deploy")).get("verdict")
    if isinstance(command, str) and command and answer in ("yes", "up_to"):
        lines.append(f"Serve it with   {command}")
    return lines


def _places(folder: Path, steps: dict[str, Any]) -> list[str]:
    places = {"Draft": "draft", "Report": "report.html", "Timeline": "timeline.json"}
    if any(_dict(about).get("state") != "finished" for about in steps.values()):
        del places["Draft"]  # The link still shows the draft of an earlier run.
    return [f"{what:15} {folder / name}" for what, name in places.items() if (folder / name).exists()]


def _times(verdict: dict[str, Any], steps: dict[str, Any]) -> list[str]:
    lines = []
    taken = {
        name: seconds for name, seconds in _dict(verdict.get("seconds")).items() if isinstance(seconds, int | float)
    }
    reused = [name for name, about in steps.items() if _dict(about).get("reused")]
    fresh = [f"{name} {duration(seconds)}" for name, seconds in taken.items() if name not in reused]
    if fresh:
        lines.append(f"Time            {', '.join(fresh)}")
    if reused:
        saved = sum(taken.get(name, 0.0) for name in reused)
        lines.append(f"Reused          {', '.join(reused)} ({duration(saved)} saved)")
    return lines


def _overlap(folder: Path) -> list[str]:
    """How long the run took, how long was expected, and what overlap saved; nothing where there was none to save."""
    found = _dict(_dict(_object(folder / "timeline.json").get("otherData")).get("overlap"))
    took, whole = number(found.get("took")), number(found.get("one_after_another"))
    if took is None or whole is None:
        return []
    line = f"Overlap         {duration(took)} instead of {duration(whole)} one after another"
    end, low, high = (number(found.get(key)) for key in ("end", "low", "high"))
    if end is not None and low is not None and high is not None:
        line += f"; expected {duration(end)} ({duration(low)} to {duration(high)})"
    return [line]


def _share(accepted: Any, reached: Any) -> str:
    counts = isinstance(accepted, int | float) and isinstance(reached, int | float)
    return f"{accepted / reached:.1%}" if counts and reached else "–"


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _object(path: Path) -> dict[str, Any]:
    try:
        return _dict(read_json(path))
    except (OSError, UserError):
        return {}
