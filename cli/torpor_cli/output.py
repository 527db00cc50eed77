"""How results are shown: a table for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Format = Literal["table", "json"]


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """A plain table, or `empty` where there are no rows. Uses the terminal's width."""
    from rich.console import Console

    console = Console(highlight=False)
    if not rows:
        console.print(empty)
        return
    console.print(table(columns, rows))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """The same as an object that rich can show in a live view."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for name in columns:
        result.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        result.add_row(*row)
    return result


def terminal_width() -> int:
    """In characters, as rich sees it."""
    from rich.console import Console

    return Console().size.width


def seconds(value: float) -> str:
    """A time span as people write it: 340µs, 1.2ms, 5.0s, 3m, 2h."""
    if value < 0.001:
        return f"{value * 1e6:.0f}µs"
    if value < 1:
        return f"{value * 1e3:.1f}ms"
    if value < 120:
        return f"{value:.1f}s"
    if value < 7200:
        return f"{value / 60:.0f}m"
    return f"{value / 3600:.0f}h"


def size(value: int) -> str:
    """Bytes in binary units."""
    number = float(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def age(nanoseconds: int) -> str:
    """A span for a table, no finer than a tenth of a second: 0.3s, 42.0s, 3m; `now` for what is due."""
    if nanoseconds < 50_000_000:
        return "now"
    value = nanoseconds / 1e9
    return f"{value:.1f}s" if value < 1 else seconds(value)
