# Every command a user needs. `make test` and `make demo` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard src/normmatters/kernels/cpu/native/*)  # built again when they change
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: test test-torch lint install wheel-check mutation native sanitize bench demo report docs docs-images clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	# The tests interpret the kernels by triton. A GPU build of torch has brought the one that it needs; a CPU build none.
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install "triton==3.6.0; platform_system == 'Linux'"
	$(PIP) install -c constraints.txt -e ".[lab,dev,workflows]"
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Fails below 90 % coverage. Python 3.12 counts it at no cost; 3.11 takes half as long again.
test: lint
	COVERAGE_CORE=$$($(BIN)/python -c "import sys; print('sysmon' if sys.version_info >= (3, 12) else 'ctrace')") \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" --cov --cov-report=term:skip-covered

# What depends on torch's compiler, with another torch: by default the oldest that is supported. Downloads gigabytes.
TORCH ?= 2.11.0
test-torch:
	mkdir -p build
	test -x .venv-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-$(TORCH)
	(grep -v ^torch== constraints.txt; echo torch==$(TORCH)) > build/constraints-$(TORCH).txt
	.venv-$(TORCH)/bin/python -m pip --disable-pip-version-check -q install -c build/constraints-$(TORCH).txt -C wheel.cmake=false -e ".[lab,dev]"
	.venv-$(TORCH)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu" tests/surgery tests/nn tests/workflows tests/kernels/triton/batch_norm

# The built wheel, installed away from this folder, works: without kernels, and with them on each instruction set.
wheel-check: install
	NORMMATTERS_WHEEL=native $(BIN)/python -m pytest tests/test_wheel.py

# Do the tests notice a wrong line? A sample of small changes to constants, functional and optim: see docs/mutation.md.
mutation: install
	$(BIN)/python tools/mutate.py

# The native CPU kernels, built beside their sources: for work on them. Needs cmake and ninja.
native:
	mkdir -p build
	cmake -S . -B build/native -G Ninja > build/native.log && cmake --build build/native

# The tests of the native CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer. Leaks are not looked for:
# Python has its own.
sanitize: install
	mkdir -p build
	cmake -S . -B build/sanitize -G Ninja -DNM_SANITIZE=address,undefined -DNM_OUTPUT=$(CURDIR)/build/sanitize > build/sanitize.log
	cmake --build build/sanitize
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so):$$(gcc -print-file-name=libubsan.so):$$(gcc -print-file-name=libstdc++.so) \
	ASAN_OPTIONS=detect_leaks=0 NORMMATTERS_CPU_LIBRARY=$(CURDIR)/build/sanitize $(BIN)/python -m pytest tests/kernels/cpu

# Ours against the peers on this machine's device: results/bench/*.json and a picture.
bench: install
	$(BIN)/python -m normmatters.bench --out results/bench

# Every figure and table of the paper on embedded data: a few minutes on two cores. What the tests need is not installed.
demo: $(VENV)/.installed-lab
	$(BIN)/normmatters reproduce all --preset quick

# The published results, drawn again from results/ without a GPU: pages, tables, and the numbers in README and docs.
report: $(VENV)/.installed-lab
	$(BIN)/normmatters publish --into README.md --into docs/results.md

$(VENV)/.installed-lab: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test $(VENV)/.installed -nt pyproject.toml || $(PIP) install -c constraints.txt torch
	test $(VENV)/.installed -nt pyproject.toml || $(PIP) install -c constraints.txt -e ".[lab]"
	touch $@

# The site, in site/: pages are written to build/docs, then built. A warning is an error. Without a network the names of
# torch in signatures are no links; nothing else is missing.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/_site/inventories.py build/inventories
	$(BIN)/python docs/_site/pages.py build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/_site build/docs site
	@echo "The site: $(CURDIR)/site/index.html"

# The pictures of the cards, drawn again by the examples, and the tutorial's outputs with its notebook: about two minutes
# on one core.
docs-images: $(VENV)/.installed-lab
	for script in examples/*.py; do $(BIN)/python $$script docs/img/$$(basename $$script .py).png || exit 1; done
	rm -f docs/img/*.safetensors
	$(BIN)/python docs/_site/tutorial.py

$(VENV)/.installed-docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test $(VENV)/.installed -nt pyproject.toml || $(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
