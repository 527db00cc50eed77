"""The shared watch cache."""
