"""The torpor command."""
