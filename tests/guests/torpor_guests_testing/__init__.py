"""Guest modules for tests and measurements, built once from sources and kept outside the checkout.

guest = mirror("zig", "shop-07")  # examples/mirror in Zig, with "shop-07" built in: a module of its own
file = guest.place(modules)       # into a host's module folder: spec.module.file

`python -m torpor_guests_testing` builds all that the tests use beforehand.
"""

from torpor_guests_testing.cache import BuildFailed
from torpor_guests_testing.guests import LANGUAGES, SIXTY, Guest, fleet, go, mirror, python, rust, zig

__all__ = ["LANGUAGES", "SIXTY", "BuildFailed", "Guest", "fleet", "go", "mirror", "python", "rust", "zig"]
