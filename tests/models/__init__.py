"""A tiny EAGLE3 pair for tests: see README.md."""
