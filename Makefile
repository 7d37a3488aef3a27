# make run: set everything up and train the demo.   make demo-tools: a tiny model learns to call a calculator.
# make test: set everything up and run the whole test suite.   make docs: build the documentation as a site.
VENV ?= .venv
PYTHON_IN := $(VENV)/bin/python
OVERRIDES ?=
# of two cores: tests compute, and whole runs wait as well
TEST_WORKERS ?= 5
# of pytest, forked from one process that has imported what all of them do
WARM := popen//python=$(PYTHON_IN) -I -S tests/warm.py --worker
# what many tests import beside it
PRELOADED := anthropic openai mcp hypothesis scipy.optimize gymnasium \
	transformers.models.llama.modeling_llama transformers.models.mixtral.modeling_mixtral

# tests/device register a device with torch for the whole process, so they have processes of their own;
# tests/gpu have the GPU to themselves; without one they are some tests more
GPU := $(shell if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then echo yes; fi)

.PHONY: run demo-tools test check lint types docs setup clean

run: setup
	$(PYTHON_IN) -m asyncrl.launch async_ppo $(OVERRIDES)

demo-tools: setup
	$(PYTHON_IN) -m asyncrl.launch tool_calculator $(OVERRIDES)

test: setup
	$(PYTHON_IN) -m pytest tests/device -q -n 2
	$(if $(GPU),$(PYTHON_IN) -m pytest tests/gpu -q)
	ASYNCRL_TESTS_PRELOADED="$(PRELOADED)" $(PYTHON_IN) -m pytest tests $(if $(GPU),--ignore=tests/gpu) -q --tx '$(TEST_WORKERS)*$(WARM)' --dist loadfile --no-loadscope-reorder

check: lint types

lint: setup
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: setup
	$(PYTHON_IN) -m mypy

# The documentation as a site, in site/: every page is in its order, and no link is dead. Four pages are made from the code.
docs: setup
	@test -x .venv-docs/bin/zensical || (python3 -m venv .venv-docs && .venv-docs/bin/pip install -q zensical==0.0.73)
	$(PYTHON_IN) docs/made_pages.py
	.venv-docs/bin/zensical build --strict
	@echo "open site/index.html, or: python3 -m http.server -d site"

setup:
	@launchers/setup.sh $(VENV) dev,etcd

# Only what the targets above made; an environment that was there before stays, and so do runs and base models.
clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@if [ -e $(VENV)/.made-by-setup ]; then rm -rf $(VENV) && echo "removed $(VENV)"; \
	elif [ -e $(VENV) ]; then echo "$(VENV) was not made by launchers/setup.sh and stays"; fi
	@echo "not removed: ~/.cache/asyncrl, or the fileroot of your runs:"
	@echo "  models/                   base models, trained on first use"
	@echo "  <experiment>/<trial>/     runs: checkpoints, weights, metrics, logs"
	@echo "and .venv-sglang, where launchers/install_sglang_cpu.sh was asked for it"
