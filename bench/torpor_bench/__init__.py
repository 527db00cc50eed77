"""Measurements of Torpor: one module a benchmark, and the small parts they share. See `bench/README.md`."""
