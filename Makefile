# Two commands do everything on a fresh machine: make demo, make test.
PYTHON := .venv/bin/python

.PHONY: demo test lint env
.DEFAULT_GOAL := test

env:
	@tests/setup_env.sh

demo: env
	$(PYTHON) -m bench.demo

test: env lint
	$(PYTHON) -m pytest

lint: env
	.venv/bin/ruff check .
	.venv/bin/mypy
