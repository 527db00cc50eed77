"""Decides when an operator is in memory, and where."""
