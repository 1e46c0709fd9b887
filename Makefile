# Two commands do everything on a fresh machine: make demo, make test.
PYTHON := .venv/bin/python

.PHONY: demo test lint soak env
.DEFAULT_GOAL := test

env:
	@tests/setup_env.sh

demo: env
	$(PYTHON) -m bench.demo

test: env lint
	$(PYTHON) -m pytest

# What is too long for every run: ten thousand steps with flips at random moments.
soak: env
	$(PYTHON) -m pytest -m soak -s

lint: env
	.venv/bin/ruff check .
	.venv/bin/mypy
