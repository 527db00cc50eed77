"""`python bench/run.py NAME`: runs one benchmark, prints a table, writes `bench/out/NAME.json`. QUICK=1 in the
environment for the short form where a benchmark has one."""

import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The benchmarks start the mesh as the tests do: the same control plane, the same guests.
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "guests")]
# A service that compiles its own modules at start is larger by 2 MB and more; where it is deployed, it does not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from torpor_bench.machine import machine, versions  # noqa: E402
from torpor_bench.report import Report  # noqa: E402

BENCHMARKS = ("wake", "throughput", "idle")


def main() -> int:
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in BENCHMARKS:
        print(f"usage: make bench NAME={'|'.join(BENCHMARKS)} [QUICK=1]", file=sys.stderr)
        return 2
    quick = os.environ.get("QUICK", "") not in ("", "0")
    benchmark = import_module(f"torpor_bench.{name}")
    if quick and not benchmark.HAS_QUICK:
        print(f"{name} has no quick form: it runs whole", file=sys.stderr)
        quick = False
    on = machine()
    figures = asyncio.run(benchmark.run(quick=quick))
    report = Report(name, quick, on, versions(), figures)
    print(
        f"\n{name}{' (quick)' if quick else ''} on {on['cores']} cores, worth {on['cores_worth']} of one alone, "
        f"load at start {on['load_1m']}"
    )
    print("\n".join(report.table()))
    print(f"written to {os.path.relpath(report.write(HERE / 'out'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
