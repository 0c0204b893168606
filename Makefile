# Everything runs in a local virtual environment that the first command makes; Python and make are all it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# what to install beside the runtime dependencies; `make test EXTRAS=torch` adds every comparison with PyTorch
EXTRAS ?=
comma  := ,
space  := $() $()
# the extras installed are written in the stamp's name: .venv/.installed-test-demo-torch
STAMP   = $(VENV)/.installed-$(subst $(space),-,$(strip $(1)))
# two processes on two cores: threads inside them would only get in each other's way
QUIET_THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help demo test node lint format bench clean
help:
	@echo "make demo    train a CNN on handwritten digits, export it, check the export"
	@echo "make test    run the tests"
	@echo "make node    install onnxruntime-node, so that the tests train in it too"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make bench   time training steps against other ways to train; writes docs/performance.md"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(subst -,$(comma),$*)]"
	@touch $@

demo: $(call STAMP,demo)
	$(BIN)/gradgraph demo

test: $(call STAMP,test demo $(EXTRAS))
	$(QUIET_THREADS) $(BIN)/python -m pytest -n 2 $(ARGS)

# the package's own install script would fetch a CUDA library; the CPU build is in the package
node: examples/node/node_modules
examples/node/node_modules: examples/node/package.json
	cd examples/node && npm install --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error
	@touch $@

lint: $(call STAMP,lint)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(call STAMP,lint)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(call STAMP,bench)
	$(BIN)/python -m benchmarks.run --save $(ARGS)

clean:
	rm -rf $(VENV) .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
