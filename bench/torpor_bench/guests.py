"""Sources of Python operators that differ: as text, since a thousand of them need no folder of built files."""

from __future__ import annotations

from torpor_bench.machine import ROOT

_MIRROR = ROOT / "examples" / "mirror" / "python" / "operator.py"
_READER = ROOT / "bench" / "guests" / "reader.py"
_LINE = 'BUILD = "python"'


def python_mirror(build_id: str) -> str:
    """`examples/mirror` in Python."""
    return _stamped(_MIRROR.read_text(), build_id)


def python_reader(build_id: str) -> str:
    return _stamped(_READER.read_text(), build_id)


def _stamped(source: str, build_id: str) -> str:
    if source.count(_LINE) != 1:
        raise RuntimeError(f"the operator has no line {_LINE}")
    return source.replace(_LINE, f'BUILD = "{build_id}"')
