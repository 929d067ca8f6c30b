# Two commands do everything: `make train` and `make test`. Both set up what they need first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
PY := $(VENV)/bin/python
# Config and preset: make train CONFIG=configs/swe.py:quickstart
CONFIG ?= configs/swe.py
# Extra arguments of the run: make train ARGS="--workdir=runs/one --config.seed=1"
ARGS ?=
# Extra arguments of pytest: make test TESTS="tests/rl -k clip"
TESTS ?=
# Workers of pytest, and the longest one test may take.
WORKERS ?= 2
# Where the red team's rows go; RESUME=1 plays only what is missing there or does not hold.
OUT ?= .cache/redteam.json
RESUME ?= 0
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache

.PHONY: help setup setup-test train test lint format redteam-json lane-bench lane-leaks \
    lane-redteam lane-sandbox-bench verify-% lane-%

help:
	@echo "make train  set up, then run the main job (CONFIG=... picks a preset, ARGS=... adds flags)"
	@echo "make test   set up, then run every test (TESTS=... picks some)"
	@echo "make setup  set up alone: Debian packages as root, .venv, the sandbox base image"
	@echo "make lane-parity  every model family against torch and transformers, in a venv of its own"
	@echo "make lane-templates  chat-template prompts against another renderer, in a venv of its own"
	@echo "make lane-agents  real scaffolds on a real SWE-bench row, through gateway and engine"
	@echo "make lane-leaks   1,000 episodes with faults injected: nothing may be left on the host"
	@echo "make lane-ray     sandbox hosts placed by Ray, a node killed in the middle, in a venv of its own"
	@echo "make lane-kubernetes  sandboxes as pods of a fake API server, in a venv of its own"
	@echo "make redteam-json OUT=FILE  every trick against sandboxes and grading, with its control"
	@echo "make lint   format check, lint, types, import rules"
	@echo "make verify-01-main-job  measure what the main job promises; writes docs/verify/"
	@echo "make verify-02-learner   measure what the learner promises: exactness, plans, speed, refusals"
	@echo "make verify-03-gateway   measure what the gateway promises: exact tokens, clients, agents, load"
	@echo "make verify-04-sandboxes what sandboxes promise: one contract, no leak, no cheat, hosts, speed"
	@echo "make lane-sandbox-bench  time sandboxes against docker SDK, swe-rex and mini-swe-agent"
	@echo "make lane-bench  time the train step against torch and tunix (their own environments)"

setup:
	@.ci/setup train

setup-test:
	@.ci/setup test

train: setup
	$(PY) launchers/train.py --config=$(CONFIG) $(ARGS)

test: setup-test
	$(PY) .ci/with_docker.py $(PY) -m pytest -n $(WORKERS) --dist=worksteal -rs $(TESTS)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

verify-%: setup-test
	$(PY) benchmarks/verify.py $*

# Rows {"trick", "kind", "backend", "defended", "control"}; fails if one is not (true, true).
redteam-json lane-redteam: setup-test
	@mkdir -p $(dir $(OUT))
	$(PY) -m tests.redteam OUT=$(OUT) RESUME=$(RESUME)

# Promised of the small shape in fp32: at least level with torch + transformers and 1.6 x tunix.
# All calls run; the lane fails if one of them did.
lane-bench: setup
	@status=0; \
	bench() { $(PY) benchmarks/learner.py --shape=small "$$@" || status=1; }; \
	bench --peer=torch --rounds=9 --hugepages --at_least=1.0; \
	bench --peer=tunix --rounds=9 --hugepages --at_least=1.6; \
	bench --peer=torch --dtype=bfloat16; \
	bench --peer=tunix --dtype=bfloat16; \
	exit $$status

# 700 episodes on bwrap and 300 on docker; one JSON line, and a failure if anything is left.
lane-leaks: setup-test
	$(PY) benchmarks/sandbox_leaks.py

# Promised: the channel's round trip under 2 ms, `true` under 6 ms on bwrap; on docker 60 ms from
# asking a warm pool to a result, and 1.3 x the raw docker SDK's cycles with the refill counted.
lane-sandbox-bench: setup-test
	@status=0; \
	bench() { $(PY) .ci/with_docker.py $(PY) benchmarks/sandbox.py "$$@" || status=1; }; \
	bench --backend=bwrap --peers=docker_sdk,swerex,mini --roundtrip_below=2 --exec_below=6; \
	bench --backend=docker --peers=docker_sdk,swerex,mini --roundtrip_below=2 --first_below=60 \
	    --at_least=1.3; \
	exit $$status

# Tests against packages that .venv has not (tests/lanes), each in an environment of its own.
lane-%:
	@.ci/lane $* $(TESTS)
