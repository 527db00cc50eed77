"""Runs the guests: compile, image, load, run, unload, wake."""
