"""Measurements: what each is for and how to run it is in bench/README.md."""
