# Every command a user needs. `make test` and `make demo` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: test lint install bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	# The tests interpret the kernels by triton. A GPU build of torch has brought the one that it needs; a CPU build none.
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install "triton==3.6.0; platform_system == 'Linux'"
	$(PIP) install -c constraints.txt -e ".[lab,dev]"
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

# Ours against the peers on this machine's device: results/bench/*.json and a picture.
bench: install
	$(BIN)/python -m normmatters.bench --out results/bench

# Every figure and table of the paper on embedded data: a few minutes on two cores. What the tests need is not installed.
demo: $(VENV)/.installed-lab
	$(BIN)/normmatters reproduce all --preset quick

report: $(VENV)/.installed-lab
	$(BIN)/normmatters report runs/quick --out runs/quick/report

$(VENV)/.installed-lab: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/.installed || $(PIP) install -c constraints.txt torch
	test -e $(VENV)/.installed || $(PIP) install -c constraints.txt -e ".[lab]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
