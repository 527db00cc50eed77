"""Builds CPython as one core Wasm module that runs Torpor operators. Standard library only; see `build.py`."""
