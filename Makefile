# What a person types; the work is done by the scripts in packaging/.
VERSION := $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
IMAGE := trainer:$(VERSION)
BIN := .venv/bin
NODES ?= 2
GPUS ?= 2
export BASE_IMAGE CI ENGINE PYTHON

.DEFAULT_GOAL := help
.PHONY: help run venv image engine check test test-fast test-real testbed testbed-down golden lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile | expand -t 20

run: venv  ## train a detector on 2 nodes x 2 processes on this machine (ARGS="..." is passed on to clusterctl launch)
	@if packaging/engine.sh --check; then packaging/image.sh $(IMAGE) || \
	{ echo "hint: without an image: $(BIN)/clusterctl launch --nodes $(NODES) --gpus $(GPUS) --backend local"; exit 1; }; \
	else echo "no Docker Engine with compose here: the nodes will be process groups (make engine sets one up)"; fi
	$(BIN)/clusterctl launch --backend here --nodes $(NODES) --gpus $(GPUS) $(ARGS)

venv: .venv/.ready  ## .venv with the pinned packages and this project (PYTHON=python3.12 chooses the interpreter)

.venv/.ready: requirements/dev.txt pyproject.toml packaging/venv.sh
	@packaging/venv.sh
	@touch $@

image:  ## the container image trainer:VERSION (BASE_IMAGE=NAME chooses what it stands on)
	@packaging/image.sh $(IMAGE)

engine:  ## a Docker Engine with compose and buildx, installed and started on a Debian machine as root
	@packaging/engine.sh

check: venv  ## formatting, lint, types, import directions, shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck $$(git ls-files '*.sh' .ci)

test: venv check  ## check, and all tests except those on three hosts (ENGINE=no: without a Docker Engine)
	@packaging/test.sh $(IMAGE)

test-fast: venv  ## unit and golden tests without the slow ones, while you edit (ARGS="-k NAME" and the like)
	GOMP_SPINCOUNT=3000 $(BIN)/python -m pytest -n 3 --dist worksteal tests/unit tests/golden -m "not slow" $(ARGS)

test-real: venv  ## the tests on the three hosts of the testbed, which it starts
	@packaging/test.sh $(IMAGE) real

testbed:  ## three hosts on this machine to try things on: n0, n1, n2 with sshd, Docker Engine and Slurm
	@testbed/up.sh
	@packaging/image.sh $(IMAGE)
	@testbed/image.sh $(IMAGE)

testbed-down:  ## take the three hosts away, without a trace (ARGS=--image: their image too)
	@testbed/down.sh $(ARGS)

golden: venv  ## rewrite the expected plans in tests/golden; the diff is the review
	GOLDEN=write $(BIN)/python -m pytest tests/golden

lock:  ## pin the packages anew from pyproject.toml (ARGS=--upgrade: the newest versions)
	packaging/lock.sh $(ARGS)

clean:  ## remove what was built here, but not .venv, the image and the runs
	rm -rf build dist *.egg-info .make .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find cluster trainer tests -name __pycache__ -prune -exec rm -rf {} +
