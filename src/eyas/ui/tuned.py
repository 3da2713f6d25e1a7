"""What `eyas tune` says at its end: the table, the winner, and how to use it."""

from collections.abc import Mapping
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.ui.text import duration


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print tune.json for people. What may be copied is never wrapped."""
    _say(console, f"Goal: {found['goal']}. {_machine(found['machine'])}")
    if found["all_reduce"]:
        console.print(_all_reduce(found["all_reduce"]))
    if found["default"]:
        console.print(_trials(found))
    if found["left_out"]:
        _say(console, "Left out", *(f"  {one['name']}: {one['why']}" for one in found["left_out"]), "")
    _say(console, *_winner(found))


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _machine(machine: Mapping[str, Any]) -> str:
    gpus = f"{machine['gpus']} x {machine['gpu']}, linked by {machine['links']}" if machine["gpus"] else "no GPU"
    return f"SGLang {machine['sglang']}, {gpus}"


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if column in right else "left", no_wrap=number == 0)
    return table


def _all_reduce(played: Mapping[str, Any]) -> Table:
    sizes = [f"{elements} {played['dtype']}, us" for elements in played["elements"]]
    table = _table("stand-alone all-reduce", "round", *sizes, "times as fast", right=("round", *sizes))
    for row in played["rows"]:
        times = [f"{one:.1f}" for one in row["microseconds"] or ["" for _ in sizes] if one != ""]
        times += [""] * (len(sizes) - len(times))
        table.add_row(Text(row["name"]), str(row["round"]), *times, Text(row["failed"] or _ratio(row["ratio"])))
    return table


def _trials(found: Mapping[str, Any]) -> Table:
    rates = [f"tok/s at {at}" for at in found["concurrencies"]]
    table = _table(
        "setting", *rates, "blocks", "start", "times as fast as the default", right=(*rates, "blocks", "start")
    )
    for row in [found["default"], *found["trials"]]:
        figures = [row["figures"].get(str(at), {}).get("tokens_per_second") for at in found["concurrencies"]]
        start = duration(row["start_seconds"]) if row["start_seconds"] is not None else ""
        said = row["why"] or ("" if row is found["default"] else _ratio(row["ratio"]))
        said = f"{row['state']}: {said}" if row["why"] else said
        shown = [f"{figure:.1f}" if figure else "" for figure in figures]
        table.add_row(Text(row["name"]), *shown, str(row["blocks"] or ""), start, Text(said))
    return table


def _winner(found: Mapping[str, Any]) -> list[str]:
    confirmed = found["confirmation"]
    ratio = confirmed["ratio"] if confirmed else None
    lines = [f"Loads      {found['loads']} of the server; a grid would take {found['grid_loads']}"]
    if ratio and ratio["ratio"]:
        order = ", ".join(confirmed["order"])
        lines.append(
            f"Confirmed  {_ratio(ratio)} times as fast as the default; drift {confirmed['drift']:.3f} ({order})"
        )
    kept = "the default is kept" if found["default_kept"] else found["winner"]["name"]
    lines += [f"Winner     {kept}: {found['why']}", f"Launch     {found['launch']}"]
    if not found["default_kept"]:
        said = {name: part for name, part in found["run_file"]["server"].items() if part}
        text = yaml.safe_dump({"server": said}, sort_keys=False).rstrip()
        lines += ["Run file", *(f"  {line}" for line in text.splitlines())]
    return lines


def _ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["ratio"] is None:
        return "–"
    interval = f", {ratio['low']:.3f} to {ratio['high']:.3f}" if ratio["low"] is not None else ""
    return f"{ratio['ratio']:.3f}{interval}"
