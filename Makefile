# make setup        set up .venv with PYTHON (python3), or with a Python that uv finds or downloads if
#                   that version is not supported; `make clean` removes it
# make demo         set up, then convert, export, deploy and evaluate the bundled model
# make triton       install the tritonserver of NVIDIA's PyTriton into .triton (Python 3.11 or 3.12)
# make test         set up, add the developer tools, run every test this machine can run, WORKERS (3)
#                   files at a time
# make coverage     run unit and golden tests; fail if line coverage is below that of pyproject.toml
# make lint         ruff, mypy --strict, codespell, words and links; `make format` fixes what ruff can
# make docs         build the documentation site in site/; fail on a warning or a broken link
# make release      build a release in dist/: reproducible, checked wheel and sdist, an SBOM, and notes
#                   from CHANGELOG.md; upload nothing
# make soak         run the endurance tests, each 100 times as long, and long tests; takes hours
# make clones       test a clean clone, set-up and demo with each supported Python of this machine
# make constraints  update the pins, then `make wheels`
# make wheels       check that each pin has a wheel for every Python, on x86-64 and aarch64
#
# TORCH_BACKEND=cpu, auto or cu130 (uv's --torch-backend) takes torch from PyTorch's own index. The
# default, auto, is the small build if there is no GPU; empty takes the package index's build.
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
# Tests and demos start hundreds of Python processes, so bytecode must be cached.
export PYTHONDONTWRITEBYTECODE :=
# Environment of the tritonserver in NVIDIA's PyTriton, which needs an older numpy and Python.
TRITON := .triton
# Show only the larger downloads of pip, with their sizes.
SIZES  := | sed -unE 's/^ *Downloading (.*[0-9.]+ [MG]B.*)/  \1/p'
# PINNED installs the pins of a file into an environment, TORCH installs torch.
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
	@echo "step 1 of 3: installing the packages that serve a model into $(VENV)"
	@$(call PINNED,$(VENV),constraints)
	@echo "step 2 of 3: installing torch (0.2 GB for the CPU, 2.5 GB with CUDA)"
	@$(call TORCH,$(VENV))
	@echo "step 3 of 3: installing this project"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(TOOLS): $(STAMP) requirements/developer.txt
	@echo "installing the developer tools into $(VENV)"
	@$(call PINNED,$(VENV),developer)
	@touch $@

$(PUBLISH): $(STAMP) requirements/publish.txt
	@echo "installing the release tools into $(VENV)"
	@$(call PINNED,$(VENV),publish)
	@touch $@

triton: $(TRITON)/.installed
	@test -e $<

# uv finds or downloads a suitable Python. If it cannot, `make test` runs without tritonserver.
$(TRITON)/.installed: $(STAMP) requirements/triton.txt
	@echo "installing the tritonserver of NVIDIA's PyTriton into $(TRITON)"
	@$(BIN)/uv venv --quiet --clear --seed --python '>=3.11,<3.13' $(TRITON) || exit 0; \
	$(call PINNED,$(TRITON),triton) && $(call TORCH,$(TRITON)) && touch $@

demo: $(STAMP)
	$(BIN)/python main.py export=gpt3/sample 'stages=[convert,export,deploy,evaluate]'

test: $(TOOLS) $(TRITON)/.installed
	@tests/system_packages.sh
	# Idle OpenMP threads spin on the other workers' cores, hence OMP_NUM_THREADS=1. Slow folders come
	# first, so that no worker is left alone with a slow file at the end.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder tests/integration tests/reliability tests/parity tests/golden tests/unit

coverage: $(TOOLS) $(TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
	  tests/unit tests/golden --cov

docs: $(PUBLISH)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# All files get the time of the commit, so that the build is reproducible.
VERSION = $(shell sed -nE 's/^__version__ = "(.*)"/\1/p' foundations/__init__.py)
# This wheel is for every processor; .github/workflows/wheels.yml builds those with compiled kernels.
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

# Update the pins for every Python, x86-64 and aarch64; a pin is kept as long as it fits. CUDA packages
# are left out, since torch pins them. developer.txt has only packages that are not in constraints.txt.
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

# Ask the package index for a wheel of every pin. The two packages of --no-binary have none, but are
# pure Python. --no-config ignores pyproject.toml's own constraints.
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
