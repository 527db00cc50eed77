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


def since(unix_ns: int, now_ns: int) -> str:
    """How long ago, or how far ahead with a leading `in`; a dash for never."""
    if not unix_ns:
        return "-"
    if unix_ns > now_ns:
        return f"in {seconds((unix_ns - now_ns) / 1e9)}"
    return f"{seconds((now_ns - unix_ns) / 1e9)} ago"
