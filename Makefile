# Each of these does everything on a fresh machine: make demo, make test (the default), make soak.
PYTHON := .venv/bin/python

NEWEST := 0.5.23
# A server takes a core and some 2 GiB. Groups and their order are those of tests/conftest.py.
PYTEST := -m pytest -n logical --maxprocesses=4 --no-loadscope-reorder

.PHONY: demo test test-release test-newest lint soak env
.DEFAULT_GOAL := test

env:
	@tests/setup_env.sh

demo: env
	$(PYTHON) -m bench.demo

test: env lint
	$(PYTHON) $(PYTEST)
	@$(MAKE) --no-print-directory test-newest

# All engine tests on another release: make test-release RELEASE=0.5.17. Its environment is .venv-0.5.17.
# With CORE=1 the ones in which releases differ: tokens, slots, the draft, features, the context limit.
# To 0.5.12 trees and servers without overlap are not served.
CORE_PAGES = $(if $(filter 0.5.11 0.5.12%,$(RELEASE)),page16-overlap-topk1,page16-sync-topk4)
CORE_TESTS = (page1-overlap-topk1 or $(CORE_PAGES)) and (by-load or every-3) \
    or test_slots or test_limits or test_features and flips or chain and (64 or prefix) or writes_later

test-release:
	@RELEASE=$(RELEASE) tests/setup_env.sh
	.venv-$(RELEASE)/bin/python $(PYTEST) tests/engine $(if $(CORE),-k "$(CORE_TESTS)")

# The same core on the newest release.
test-newest:
	@$(MAKE) --no-print-directory test-release RELEASE=$(NEWEST) CORE=1

# What is too long for every run: ten thousand steps with flips at random moments, hundreds of random scripts, and ten
# minutes of load. Leaves its result in bench/results.
soak: env
	@rm -f .soak.xml
	-$(PYTHON) $(PYTEST) -m soak --junitxml=.soak.xml
	$(PYTHON) -m bench.soak --seconds 600 --tests .soak.xml

lint: env
	.venv/bin/ruff check .
	.venv/bin/mypy
