"""`torpor_bench` belongs to no distribution: it is found beside the checkout's other folders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
