"""Kubernetes manifests that Torpor installs, as package data."""
