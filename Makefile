# Everything runs in .venv, which make creates; nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := $(VENV)/oldest/.installed

# `import kernels` must never find this folder: Transformers imports a package of that name.
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow test-gpu lint typecheck goldens bench matrix clean

demo: $(STAMP)
	$(BIN)/gemkv demo

# One process a core, one torch thread each; a file's tests stay in one process (they share models), and files go by
# name, so that slow files with few tests are not the last.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
test: $(STAMP) $(OLDEST)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# More of the same, at more sizes and devices, which CI has no time for.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not gpu" -n $(JOBS) $(ARGS)
	TRITON_INTERPRET=0 $(BIN)/pytest -m "slow and not gpu" tests/test_triton_chunk_compile.py tests/test_triton_decode_compile.py

# In an environment that has torch with CUDA, Triton and Transformers: make test-gpu STAMP= BIN=/path/to/its/bin
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu --results tests/results/gpu.json $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy needs the folders where they import: a tree of links does that.
typecheck: $(STAMP)
	rm -rf .typecheck && mkdir -p .typecheck/gemkv_compile
	cd .typecheck/gemkv_compile && ln -s ../../gemkv_compile/* ../../passes ../../kernels .
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p gemkv_compile

goldens: $(STAMP)
	GEMKV_ACCEPT_GOLDENS=1 $(BIN)/pytest -q tests/test_rules.py
	git --no-pager diff --stat -- tests/goldens

# What needs a GPU says so and is left out where there is none; the README's tables are made of the results.
bench: $(STAMP)
	cd examples/benchmarks && for name in $(BENCHMARKS); do PYTHONPATH=. ../../$(BIN)/python $$name.py || exit 1; done
	cd examples/benchmarks && ../../$(BIN)/python tables.py && PYTHONPATH=. ../../$(BIN)/python plots.py
BENCHMARKS ?= kv_memory passes_time step_overhead int8_forms int4_forms drop_policies drop_shares decode_kernel append \
              linears prefill_kernel prefill_engines end_to_end prefill_end_to_end memory_end_to_end step_split cold_start

# Every family, attention and cache (half an hour); ARGS="--families llama,gemma3" runs these again. Scripts import each other.
matrix: $(STAMP)
	cd examples/benchmarks && PYTHONSAFEPATH= ../../$(BIN)/python matrix.py $(ARGS)
	cd examples/benchmarks && ../../$(BIN)/python tables.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,demo,bench]"
	touch $@

# The oldest Transformers that is supported, for one test: its packages alone, beside the environment's torch.
$(OLDEST): constraints-oldest.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt --target $(dir $@) transformers
	touch $@

clean:
	rm -rf $(VENV) .typecheck build dist *.egg-info .hypothesis
