# `make help` lists the targets.

FRIT := target/release/frit
PREFIX := /usr/local

.PHONY: help setup build install release wheel demo test check clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: ## install LLVM/MLIR 22 and the libraries it needs, where missing
	@.ci/setup.sh

build: setup ## build the command-line programs in target/release
	cargo build --release

install: ## install the programs that `make build` built, their man pages and shell completions below PREFIX (/usr/local)
	@.ci/install target/release "$(DESTDIR)$(PREFIX)"

release: setup ## build the programs for x86-64 Linux with glibc 2.31 and later, as an archive in target
	@.ci/release

wheel: setup ## build the Python package for the same systems, as a wheel in target/wheels; needs maturin (pip install maturin)
	@.ci/wheel

demo: build ## train a small GPT-2 on 4 ranks, in bf16, fully sharded
	@FRIT=$(FRIT) examples/demo.sh

test: setup ## run all tests; those that lack ptxas, cuDNN, ONNX's test files, onnxruntime, pytest, torch, MPI, Z3, Chromium or qemu are counted at the end
	@.ci/test

check: ## what continuous integration runs: format, lints, tests
	@.ci/run

clean: ## remove what was built, and the demo's output
	cargo clean
	rm -rf demo-out
