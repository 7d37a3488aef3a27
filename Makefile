# make run: set everything up and train the demo.   make test: set everything up and run the whole test suite.
VENV ?= .venv
PYTHON_IN := $(VENV)/bin/python
OVERRIDES ?=

.PHONY: run test check setup clean

run: setup
	$(PYTHON_IN) -m asyncrl.launch async_ppo $(OVERRIDES)

test: setup
	$(PYTHON_IN) -m pytest tests/unit -x -q
	$(PYTHON_IN) -m pytest tests/integration tests/e2e tests/faults tests/gpu -q

check: setup
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .
	$(PYTHON_IN) -m mypy

setup:
	@launchers/setup.sh $(VENV) dev,etcd

clean:
	rm -rf $(VENV)
