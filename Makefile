# Commands for developers. The scripts are in packaging/.
VERSION := $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
IMAGE := trainer:$(VERSION)
BIN := .venv/bin
NODES ?= 2
GPUS ?= 2
export BASE_IMAGE CI DEVICE ENGINE PYTHON

.DEFAULT_GOAL := help
.PHONY: help run venv image engine check test test-prepare test-fast test-gpu test-real test-kubernetes testbed testbed-kubernetes \
	testbed-down docs diagrams readme golden lock dist clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile | expand -t 27

run: venv  ## train a detector on 2 nodes x 2 processes on this machine (ARGS="..." for clusterctl launch)
	@if packaging/engine.sh --check; then packaging/image.sh $(IMAGE) || \
	{ echo "hint: without an image: $(BIN)/clusterctl launch --nodes $(NODES) --gpus $(GPUS) --backend local"; exit 1; }; \
	else echo "no Docker Engine with compose: the nodes run as local processes (make engine installs one)"; fi
	$(BIN)/clusterctl launch --backend here --nodes $(NODES) --gpus $(GPUS) $(ARGS)

venv: .venv/.ready  ## .venv with the pinned packages and this project (PYTHON=python3.12 chooses the interpreter)

.venv/.ready: requirements/dev.txt pyproject.toml packaging/venv.sh
	@packaging/venv.sh
	@touch $@

image:  ## the container image trainer:VERSION (BASE_IMAGE=NAME sets its base image)
	@packaging/image.sh $(IMAGE)

engine:  ## a Docker Engine with compose and buildx, installed and started on a Debian machine as root
	@packaging/engine.sh

check: venv  ## formatting, lint, types, import directions, words, shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python packaging/words.py
	$(BIN)/shellcheck $$(git ls-files '*.sh' .ci)

test: venv check  ## check, and all tests except those on three hosts (ENGINE=no: without a Docker Engine)
	@packaging/test.sh $(IMAGE)

test-prepare: venv  ## what the tests need: packages, a Docker Engine, the container image
	@packaging/test.sh $(IMAGE) prepare

test-fast: venv  ## unit and golden tests without the slow ones, while you edit (ARGS="-k NAME")
	GOMP_SPINCOUNT=3000 $(BIN)/python -m pytest -n 3 --dist worksteal tests/unit tests/golden -m "not slow" $(ARGS)

test-real: venv  ## start the testbed and run the tests on its three hosts
	@packaging/test.sh $(IMAGE) real

test-kubernetes: venv  ## start Kubernetes on the testbed and run the tests on it
	@packaging/test.sh $(IMAGE) kubernetes

test-gpu: venv  ## the tests on the GPUs of this machine (DEVICE=cpu: a rehearsal without one)
	$(BIN)/python -m pytest -n 4 --dist worksteal -rP -m gpu tests/gpu $(ARGS)

testbed:  ## start three hosts on this machine: n0, n1, n2 with sshd, Docker Engine and Slurm
	@testbed/up.sh
	@packaging/image.sh $(IMAGE)
	@testbed/image.sh $(IMAGE)

testbed-kubernetes: testbed  ## start Kubernetes on the three hosts (the first time, it is built: 8 to 18 minutes)
	@testbed/kubernetes/up.sh

testbed-down:  ## remove the three hosts and their data (ARGS=--image: their container image too)
	@testbed/down.sh $(ARGS)

docs: venv  ## the documentation as a site in the folder site (ARGS=serve: live preview)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

diagrams: venv  ## draw the diagrams of docs/ that have changed (needs npm and Chromium)
	npm install --silent --no-audit --no-fund --prefix .make/mermaid mermaid@11
	$(BIN)/python packaging/diagrams.py .make/mermaid/node_modules/mermaid/dist/mermaid.min.js

golden: venv  ## rewrite the expected plans in tests/golden; review the diff
	GOLDEN=write $(BIN)/python -m pytest tests/golden

lock:  ## pin the packages of pyproject.toml (ARGS=--upgrade: the newest versions)
	packaging/lock.sh $(ARGS)

readme:  ## write the lines of README.md that need an address of [tool.addresses] in pyproject.toml
	python3 packaging/readme.py

dist: readme  ## the source distribution and the wheel, in dist/
	@packaging/tools.sh
	.make/tools/bin/pyproject-build --no-isolation

clean:  ## remove build files and caches, but not .venv, container images and runs
	rm -rf build dist site *.egg-info .make .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find cluster trainer tests -name __pycache__ -prune -exec rm -rf {} +
