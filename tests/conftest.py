"""Fixtures shared by all tests: the real Kubernetes comes from the harness's plugin."""

pytest_plugins = ["torpor_kubernetes_testing.plugin"]
