# make setup        only set up .venv, with PYTHON (python3), or where that is too old or new with a
#                   Python that uv finds or fetches; `make clean` removes it
# make demo         set up, then convert, export, deploy and evaluate the bundled model
# make triton       the tritonserver of NVIDIA's PyTriton, into .triton, with Python 3.11 or 3.12
# make test         set up, add the tools of developers, run every test this machine can run,
#                   WORKERS (3) files at a time
# make coverage     the lines that unit and golden tests run; fails below the floor of pyproject.toml
# make lint         ruff, mypy --strict, codespell, words and links; `make format` mends what ruff can
# make docs         the documentation as a site, into site/; fails on a warning or a broken link
# make release      a release, into dist/: wheel and sdist that can be made again to the byte, checked,
#                   with the list of their contents (SBOM) and notes from CHANGELOG.md; uploads nothing
# make soak         the tests of endurance, each 100 times as long, and long ones; takes hours
# make clones       a clean clone, set-up and demo with each supported Python of this machine
# make constraints  the pins made anew, then `make wheels`
# make wheels       fail unless each pin has a wheel for every Python, on x86-64 and aarch64
#
# TORCH_BACKEND=cpu, auto or cu130 (uv's --torch-backend) takes torch from PyTorch's own index. auto,
# the default, is the small build where there is no GPU; empty takes the package index's build.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
WORKERS ?= 3
TORCH_BACKEND ?= auto
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
PUBLISH := $(VENV)/.publish
# Tests and demos start hundreds of Pythons: modules are compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# The environment of the tritonserver in NVIDIA's PyTriton, which needs an older numpy and Python.
TRITON := .triton
# The larger files that pip downloads, with their sizes.
SIZES  := | sed -unE 's/^ *Downloading (.*[0-9.]+ [MG]B.*)/  \1/p'
# The pins of a file, and torch, into an environment.
PINNED = $(1)/bin/python -m pip install --progress-bar off --no-deps --use-pep517 --require-hashes \
  --requirement requirements/$(2).txt $(SIZES)
TORCH = { test -z "$(TORCH_BACKEND)" || $(BIN)/uv pip install --python $(1)/bin/python \
  --compile-bytecode --torch-backend $(TORCH_BACKEND) --requirement requirements/torch.txt || \
  echo "no build of torch for TORCH_BACKEND=$(TORCH_BACKEND): the package index's is used"; } && \
  $(1)/bin/python -m pip install --progress-bar off --requirement requirements/torch.txt $(SIZES)

.PHONY: help setup triton demo test coverage docs release clones soak lint format constraints wheels \
  clean

help:
	@sed -n '/^#/!q;s/^# //p' Makefile

setup: $(STAMP)

$(BIN)/python:
	@if $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then \
	  $(PYTHON) -m venv $(VENV) || \
	    { echo "cannot create $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }; \
	else \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and slipway needs 3.11 to 3.14: uv finds or fetches one"; \
	  uv=$$(command -v uv) || { at=$$(mktemp -d) && trap 'rm -rf "$$at"' EXIT && uv=$$at/bin/uv && \
	    $(PYTHON) -m venv "$$at" && "$$at/bin/pip" install --quiet uv; } || \
	    { echo "uv is missing; install it, or set PYTHON=/path/to/python3"; exit 1; }; \
	  "$$uv" venv --seed --python '>=3.11,<3.15' $(VENV); \
	fi

$(STAMP): pyproject.toml hatch_build.py $(wildcard inference/parallel/native/*.[ch]) \
  requirements/constraints.txt requirements/torch.txt | $(BIN)/python
	@echo "step 1 of 3: the packages that serve a model, into $(VENV)"
	@$(call PINNED,$(VENV),constraints)
	@echo "step 2 of 3: torch (0.2 GB for the CPU, 2.5 GB with CUDA)"
	@$(call TORCH,$(VENV))
	@echo "step 3 of 3: this project"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(TOOLS): $(STAMP) requirements/developer.txt
	@echo "the tools of developers, into $(VENV)"
	@$(call PINNED,$(VENV),developer)
	@touch $@

$(PUBLISH): $(STAMP) requirements/publish.txt
	@echo "the tools that publish, into $(VENV)"
	@$(call PINNED,$(VENV),publish)
	@touch $@

triton: $(TRITON)/.installed
	@test -e $<

# uv finds a Python that fits, or fetches one. Where it cannot, `make test` goes on without.
$(TRITON)/.installed: $(STAMP) requirements/triton.txt
	@echo "the tritonserver of NVIDIA's PyTriton, into $(TRITON)"
	@$(BIN)/uv venv --quiet --clear --seed --python '>=3.11,<3.13' $(TRITON) || exit 0; \
	$(call PINNED,$(TRITON),triton) && $(call TORCH,$(TRITON)) && touch $@

demo: $(STAMP)
	$(BIN)/python main.py export=gpt3/sample 'stages=[convert,export,deploy,evaluate]'

test: $(TOOLS) $(TRITON)/.installed
	@tests/system_packages.sh
	# Threads of OpenMP that wait for work spin, on the other worker's core. Files that take minutes
	# come first, so that no worker is left alone with one at the end.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder tests/integration tests/reliability tests/parity tests/golden tests/unit

coverage: $(TOOLS) $(TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
	  tests/unit tests/golden --cov

docs: $(PUBLISH)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The time of the commit is that of every file, so that others make the same bytes.
VERSION = $(shell sed -nE 's/^__version__ = "(.*)"/\1/p' foundations/__init__.py)
# The wheel is for every processor; .github/workflows/wheels.yml makes those with compiled products.
BUILD = SLIPWAY_BUILD_KERNEL=no SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir
release: $(PUBLISH)
	@test -z "$$(git status --porcelain)" || { echo "commit or stash first"; exit 1; }
	@grep -qF '## [$(VERSION)]' CHANGELOG.md || { echo "CHANGELOG.md lacks [$(VERSION)]"; exit 1; }
	rm -rf dist build/again
	$(BUILD) dist . >/dev/null
	$(BUILD) build/again . >/dev/null
	for file in dist/*; do cmp $$file build/again/$${file##*/} || exit 1; done
	$(BIN)/twine check --strict dist/*
	cat requirements/{constraints,torch}.txt | $(BIN)/cyclonedx-py requirements --output-reproducible \
	  --pyproject pyproject.toml --output-file dist/slipway_serving-$(VERSION).cdx.json -
	sed -n '/^## \[$(VERSION)\]/,/^## \[/{/^## \[/d;p}' CHANGELOG.md >dist/NOTES.md
	cd dist && sha256sum *.whl *.tar.gz *.json >SHA256SUMS
	@echo "dist/ is ready; with a token: $(BIN)/twine upload dist/*.whl dist/*.tar.gz"

soak: $(TOOLS) $(TRITON)/.installed
	@tests/system_packages.sh
	$(BIN)/python -m pytest -m 'soak or long' --soak 100 --timeout 0

clones:
	$(PYTHON) tests/clean_clones.py

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m tests.texts

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Remake the pins for every Python, x86-64 and aarch64; a pin is kept as long as it fits. What torch
# brings for CUDA is left to torch, which pins it. developer.txt has what constraints.txt has not.
PINS = $(VENV)/pins.txt
PIN = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
  --no-header --no-annotate --generate-hashes --constraint requirements/torch.txt pyproject.toml
COMPILE = $(PIN) --extra setup --extra s3 --extra evaluate
WITHOUT_CUDA = sed -i -E -e '/^(torch|triton|cuda-[a-z]+|nvidia-(cu|n)[a-z0-9-]+)==/,/[^\\]$$/d' \
  -e "s/ ; python_full_version < '3.15' and implementation_name == 'cpython'.*\\\\/ \\\\/"
constraints: $(STAMP)
	cat requirements/{constraints,developer,publish}.txt >$(PINS)
	$(COMPILE) --extra dev --output-file $(PINS)
	$(WITHOUT_CUDA) $(PINS)
	$(COMPILE) --constraint $(PINS) --output-file requirements/constraints.txt
	$(COMPILE) --constraint $(PINS) --extra dev --output-file requirements/developer.txt \
	  $$(sed -nE 's/^([a-z0-9._-]+)==.*/--no-emit-package \1/p' requirements/constraints.txt)
	$(COMPILE) --constraint $(PINS) --extra publish --output-file requirements/publish.txt \
	  $$(sed -nE 's/^([a-z0-9._-]+)==.*/--no-emit-package \1/p' requirements/constraints.txt)
	$(PIN) --extra setup --extra triton --output-file requirements/triton.txt
	$(WITHOUT_CUDA) requirements/{constraints,developer,publish,triton}.txt
	@$(MAKE) --no-print-directory wheels

# Ask the package index for a wheel of every pin; the two packages of --no-binary have none, but are
# plain Python. --no-config leaves out pyproject.toml's own constraints.
wheels: $(STAMP)
	@for python in 3.11 3.12 3.13 3.14; do for processor in x86_64 aarch64; do \
	  echo "looking for wheels: Python $$python, $$processor"; \
	  $(BIN)/uv pip install --quiet --dry-run --no-config --no-deps --target $(VENV)/none \
	    --only-binary :all: --no-binary antlr4-python3-runtime --no-binary rouge-score \
	    --python-version $$python --python-platform $$processor-manylinux_2_35 \
	    --requirement requirements/constraints.txt --requirement requirements/developer.txt \
	    --requirement requirements/torch.txt || exit 1; \
	done; done

clean:
	rm -rf $(VENV) $(TRITON) build dist site *.egg-info
