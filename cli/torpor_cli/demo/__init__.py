"""`torpor demo`: the mesh at work on an in-memory cluster, with a table, a summary and a trace."""

from torpor_cli.demo.show import run_demo

__all__ = ["run_demo"]
