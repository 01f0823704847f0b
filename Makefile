# `make demo`, `make test` and `make docs` set up .venv first; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_EXAMPLES ?= 10000
# Libraries whose models are cut. What they ask for is left out: a torchvision, which asks for another torch.
ZOO := timm torchvision pillow peft diffusers requests importlib-metadata zipp urllib3 charset-normalizer \
	certifi x-transformers einops einx frozendict loguru torch-einops-utils
ZOO_SITE := out/zoo

.DEFAULT_GOAL := help
.PHONY: help setup demo test newcomer docs format fuzz architectures other-torch gpu-on-host clean

help:
	@echo "make demo    set up, then cut a transformer in two, train it on two processes, compare with the uncut one"
	@echo "make test    set up, then all the checks that CI runs"
	@echo "make newcomer   set up, then what somebody tries first: demo and benchmark of an installed wheel, every example and notebook; CI runs it after the tests"
	@echo "make docs    set up, then the site of the docs in out/site; warnings are errors"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make fuzz    $(FUZZ_EXAMPLES) random graphs through the splitter, a twentieth as many models through a pipeline (FUZZ_EXAMPLES=n), 60 faults, 30 kills with resume"
	@echo "make architectures   163 models of five libraries, cut in two and compared (ARGS= for all of docs/models.md anew)"
	@echo "make other-torch   the tests with the torch that a user's pip takes, the newest (TORCH=2.11.0 for another, PYTHON= for another Python, ARGS= for some of the tests)"
	@echo "make gpu-on-host   the tests for a GPU without one: on a CUDA device whose memory is the host's (tools/host_cuda; needs g++)"
	@echo "make clean   remove .venv, caches and out/"

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "partita needs Python 3.11 or newer: install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "partita needs Python 3.11 or newer, $(PYTHON) is older: name another with make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@echo "== setting up $(VENV) (once; the first time downloads torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable '.[dev,docs,hf,solver]' 2>$(VENV)/pip.err || { cat $(VENV)/pip.err; echo "the installation failed: is a package index reachable? See the lines above, then call make again"; exit 1; }
	@touch $@

setup: $(STAMP)

demo: setup
	@$(BIN)/partita demo $(ARGS)

test: setup
	@$(BIN)/python tools/check.py

newcomer: setup
	@$(BIN)/python tools/check_wheel.py --full
	@PARTITA_FUZZ_EXAMPLES=1 $(BIN)/python -m pytest tests/examples tests/demo tests/test_docs_site.py -m dear

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "out/site/index.html"

format: setup
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

fuzz: setup
	@PARTITA_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/fuzz --timeout 0 -o faulthandler_timeout=0 -s
	@PARTITA_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests --ignore tests/fuzz -m dear

architectures: ARGS ?= --cut 2
architectures: setup
	@test -d $(ZOO_SITE) || $(BIN)/python -m pip install --quiet --no-deps --target $(ZOO_SITE) $(ZOO)
	@PYTHONPATH=$(ZOO_SITE) $(BIN)/python -m tools.models_table $(ARGS)

other-torch: ARGS ?= tests
other-torch: OTHER := out/torch-$(or $(TORCH),newest)
other-torch:
	@mkdir -p out && grep -v '^torch==' constraints.txt > out/constraints.txt
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install --quiet --upgrade --constraint out/constraints.txt 'torch$(if $(TORCH),==$(TORCH))' --editable '.[dev,docs,hf,solver]'
	@$(OTHER)/bin/python -m pytest --numprocesses 2 $(ARGS)

gpu-on-host: setup
	@$(BIN)/python -m tools.host_cuda
	@PYTHONPATH=tools/host_cuda/site:. OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu --numprocesses 2 $(ARGS) tests/pipelining tests/ddp tests/cudagraphs tests/runtime

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build out src/*.egg-info
