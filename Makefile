# SPDX-License-Identifier: MIT
# The two commands that a newcomer needs are `make run` and `make test`; CMake does the work underneath.
BUILD  ?= build
PREFIX ?= /usr/local
CMAKE_FLAGS ?=

.PHONY: all run test docs wheel web web-serve install clean

all: $(BUILD)/CMakeCache.txt
	@cmake --build $(BUILD) --parallel

# Ninja if installed; otherwise CMake's default.
$(BUILD)/CMakeCache.txt:
	@cmake -S . -B $(BUILD) $(if $(shell command -v ninja),-G Ninja) $(CMAKE_FLAGS)

# Installs what is missing, builds, proves and times a little, trains the tiny model on these sources, and writes with it.
RUN ?= $(BUILD)/first-run
SHOWN = layer_norm rope gather maxpool2d linear attention
run:
	@scripts/setup run
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt
	@cmake --build $(BUILD) --parallel --target vjp_first
	@echo; $(BUILD)/vjp info
	@echo; $(BUILD)/vjp check --quick >$(BUILD)/check.txt; status=$$?; \
		grep -E '^[a-z]+: |FAILED ' $(BUILD)/check.txt | grep -v checks; tail -n 1 $(BUILD)/check.txt; \
		echo "every output with its error and bound: $(BUILD)/check.txt"; exit $$status
	@echo; for op in $(SHOWN); do $(BUILD)/vjp bench $$op --quick || exit 1; done >$(BUILD)/bench.txt && \
		awk '/^op / && !heads++ || /ward .*[▏▎▍▌▋▊▉█]/' $(BUILD)/bench.txt; \
		echo "time beside the minimum that this machine allows; all ops: $(BUILD)/vjp bench"
	@echo; rm -rf $(RUN); $(BUILD)/vjp train --out $(RUN)
	@echo; $(BUILD)/vjp sample $(RUN) --prompt "static " --temperature 0.7
	@echo; echo "what else it can do: $(BUILD)/vjp --help"

test:
	@scripts/test

# Fills the generated regions of README.md and docs/ from the program that was just built.
docs: all
	@scripts/docs

# The Python package as a wheel for this machine, tested in a fresh virtual environment.
wheel:
	@scripts/wheel

# The page and the module for browsers in build/web/ (web/README.md), and a server with the headers that threads need.
PORT ?= 8000
web:
	@scripts/web

web-serve: web
	@web/serve.py build/web $(PORT)

install: all
	@cmake --install $(BUILD) --prefix "$(PREFIX)"

clean:
	@rm -rf $(BUILD)
