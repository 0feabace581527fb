# Two commands do everything on a bare machine with Python 3.11+, git and make:
#
#   make demo    build a tiny model, train it with reinforcement learning, print what happened
#   make test    lint, types, tests
#
# Both make .venv by themselves, once. A machine with a GPU gets torch's CUDA build from PyPI; to avoid that download:
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed
MODEL := outputs/models/digit_sorting
WIRE := src/echo2/transport

# Head, learner and workers share the cores: with more than one thread each, they wait for each other's barriers.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test quick test-long lint types proto bench clean
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:

# The stamp comes last, so that an interrupted installation is taken up again; a venv without a working pip is made anew.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"echo2 needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=/path/to/python3.")'
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV) ..."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing PyTorch into $(VENV) (once; a minute or two) ..."
	@# Alone and by plain pip: resolved together with other packages, or by other installers, CPU machines get the CUDA build.
	@$(PIP) $(TORCH)
	@echo "Installing echo2 and what it needs (once; about a minute) ..."
	@$(PIP) -e '.[train,data,tasks,dev]'
	@touch $@
	@echo "Installed."

$(MODEL)/.built: | $(INSTALLED)
	@echo "Building the demo's model and warming it up (once; about 15 seconds) ..."
	@$(PY) examples/digit_sorting/build_model.py --out $(MODEL)
	@touch $@

demo: $(INSTALLED) $(MODEL)/.built
	@$(VENV)/bin/echo2 run examples/sort.toml --out outputs/demo-$$(date +%Y%m%d-%H%M%S)

# Tests of one process share the cores; those of many processes want them all.
test: lint types quick
	$(PY) -m pytest -m "not slow" tests/integration

quick: $(INSTALLED)
	$(PY) -m pytest -n auto --dist worksteal -m "not slow" --ignore tests/integration

# Thousands of random worlds more, the paper's tables, every example.
test-long: $(INSTALLED)
	$(PY) -m pytest -n auto --dist worksteal -m slow --ignore tests/integration
	$(PY) -m pytest -m slow tests/integration

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(INSTALLED)
	$(PY) -m mypy

proto: $(INSTALLED)
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src $(WIRE)/wire.proto

bench: $(INSTALLED) $(MODEL)/.built
	$(PY) benchmarks/time_to_accuracy.py

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
