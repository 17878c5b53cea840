# Two commands work on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DECODERS := .venv-decoders
LOWEST := .venv-lowest
CLUSTER := .venv-cluster
ARM := .venv-arm
CODEC := setup.py $(wildcard readers/coefficients/_codec/*)
PIP = $(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt
DEVICE_TESTS := tests/test_coefficients_device.py tests/test_fused.py tests/test_dlpack.py tests/test_text_example.py
DECODER_TESTS := tests/test_device_decode.py tests/test_loader_device.py tests/test_parity.py tests/test_timm.py

.PHONY: demo test wheels seeds test-faults test-device test-experiments test-timing test-pages test-decoders test-trainers test-corpora test-wheels test-arm test-lowest test-slurm yardsticks site site-links lint format clean

# TORCH=1 also installs PyTorch, for the comparison of batches; after make test it is installed already.
demo: $(VENV)/.ready $(if $(TORCH),$(VENV)/.ready-torch)
	$(BIN)/python examples/demo.py

# EXAMPLES=1000 tries more examples of each property than the default 40.
test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# The tests that need Triton (its interpreter runs the kernels on the CPU) or JAX, which take 1.4 GB.
test-device: $(VENV)/.ready-device
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 $(DEVICE_TESTS)

# Thousands of kills, full disks and fuzzed files: some hours. Each test prints its number of trials; TRIALS=20 runs fewer
# trials of real commands.
test-faults: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -s -m faults

# Each experiment of benchmarks/seeds with small sizes: every row must run, and every check must hold. Some minutes.
test-experiments: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m experiments tests/test_seeds.py

# Tests that depend on timing: verdicts of packer diagnose. For an idle machine.
test-timing: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m timing

# The pages of reports and of packer view in a browser: needs Chromium (Debian: apt-get install chromium).
test-pages: $(VENV)/.ready-test
	PACKER_TEST_CHROMIUM=required $(BIN)/python -m pytest -q tests/test_report.py tests/test_view_page.py

# Tests with torchvision, torchcodec and timm on the CPU, in a separate environment of several GB.
test-decoders: $(DECODERS)/.ready
	PACKER_TEST_DECODERS=required $(DECODERS)/bin/python -m pytest -q $(DECODER_TESTS)

# The scripts of examples/trainers with the real trainers, each in a separate environment (1 GB and more).
TRAINERS ?= monai rfdetr torchgeo torchtitan ultralytics
test-trainers: $(TRAINERS:%=.venvs/%/.ready)
	for name in $(TRAINERS); do \
	  PACKER_TEST_TRAINERS=required .venvs/$$name/bin/python -m pytest -q --noconftest -m trainers -k $$name \
	    -o tmp_path_retention_policy=failed tests/test_real_trainers.py || exit 1; \
	done

# Every image of the folders in CORPORA: images that Pillow reads must be read, with the same pixels, in 2 GB of memory.
test-corpora: $(VENV)/.ready-test
	CORPORA='$(CORPORA)' $(BIN)/python -m pytest -q -s -m corpora tests/test_corpora.py

# The wheel and the source archive, in empty environments, for each installed Python from 3.11 to 3.14.
test-wheels: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -q -m wheels tests/test_wheels.py

# The wheel for aarch64 under QEMU, with Python, numpy and libjpeg for aarch64 (100 MB) from Debian and the package index.
# IMAGES=FOLDER also reads the JPEGs of a folder.
test-arm: $(VENV)/.ready-dev $(ARM)/.ready wheels
	PACKER_WHEELS='$(CURDIR)/dist' PACKER_ARM='$(CURDIR)/$(ARM)' PYTHONPATH=tests $(BIN)/python -m pytest -q -s -m arm tests/arm

# Wheels in dist with the codec for x86-64 and aarch64, compiled by Clang of the package ziglang.
wheels: $(VENV)/.ready-dev
	for target in x86_64 aarch64; do \
	  PACKER_TARGET=$$target $(BIN)/python -m build --wheel --no-isolation --outdir dist || exit 1; \
	done

# Tests of code that reads and writes data by other packages, with the lowest versions that pyproject.toml allows, on the
# lowest Python, as wheels (LOWEST_PYTHON=PATH if it is not called python3.11). Needs the package index; about fifteen
# minutes.
# Left to make test: tests that need PyTorch, servers of object stores or packages of the extra "test" (loaders,
# pipelines, trainers, comparisons with other programs); and, because they take long, the cache, staging to several
# nodes, tools, kills and faults, which have not been tried with these versions.
LOWEST_PYTHON ?= python3.11
# Files matched below that need PyTorch or a server of an object store.
NEED_MORE = tests/test_convert_ops.py tests/test_index_checksums.py tests/test_order_mixed.py
LOWEST_TESTS = $(filter-out $(NEED_MORE),$(wildcard tests/test_formats.py tests/test_format_*.py tests/test_source*.py tests/test_sets*.py \
  tests/test_convert*.py tests/test_index_*.py tests/test_hostile_*.py tests/test_order*.py tests/test_view.py \
  tests/test_view_*er.py tests/test_view_export.py tests/test_readers.py tests/test_reader_contract.py \
  tests/test_writer.py tests/test_verify.py tests/test_fields.py tests/test_headers.py tests/test_decode.py \
  tests/test_extract.py tests/test_staging.py tests/test_damaged_sets.py tests/test_cli.py tests/test_unusual_images.py \
  tests/test_report.py tests/test_selection.py tests/test_split_column.py tests/test_table_columns.py \
  tests/test_tree_layouts.py tests/test_foreign_shards.py tests/test_recordio.py \
  tests/test_dedup.py tests/test_names.py tests/test_saved_listing.py tests/test_listing.py \
  tests/test_pixel_sources.py tests/test_adoption.py \
  tests/test_reencode.py tests/test_nothing_vanishes.py tests/test_outputs.py))
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest -q -n 2 $(LOWEST_TESTS)

# The batch scripts of examples/slurm on a Slurm of two nodes, which runs on this machine during the tests. Needs root and
# Slurm's programs; ten minutes, because Slurm enforces time limits to within a minute.
test-slurm: $(VENV)/.ready-test
	$(BIN)/python tests/cluster/two_nodes.py --check
	$(BIN)/python -m pytest -v -m slurm -o log_cli=true --log-cli-level=INFO tests/cluster

# Batch systems, MPI, NFS, Dask, Ray and object stores, all on this machine in separate namespaces; see docs/cluster.md.
# Needs root; installs Debian packages, and lists at the end those that it could not install. About half an hour.
# TESTS="-k nfs" runs some tests.
test-cluster: $(CLUSTER)/.ready
	PATH="$(CURDIR)/$(CLUSTER)/bin:$(CURDIR)/$(CLUSTER)/node_modules/.bin:$$PATH" \
	  PYTHONPATH=tests/cluster $(CLUSTER)/bin/python tests/cluster/isolated.py $(CURDIR)/$(CLUSTER)/bin/python -m pytest \
	  -v -m cluster $(TESTS) tests/cluster

# The experiments of five documents, one after the other: pages in docs/seeds. About half an hour on an idle machine.
# SEEDS="s001 s004" runs some, IMAGES=FOLDER uses your JPEGs, OPTIONS="--smoke" is passed to each.
SEEDS ?= s000 s001 s002 s003 s004
seeds: $(VENV)/.ready-test
	failed=; for name in $(SEEDS); do \
	  $(BIN)/python benchmarks/seeds/$$name.py $(if $(IMAGES),--images '$(IMAGES)') $(OPTIONS) || failed="$$failed $$name"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Benchmark suites of other projects with a row of packer (docs/yardsticks.md): `make outside-NAME` installs a suite of
# benchmarks/outside in a separate environment (SOURCE=FOLDER: a copy of its repository); `make yardsticks` runs the
# installed suites, without the network. OUTSIDE="torchdata" runs some, IMAGES=FOLDER uses your JPEGs.
yardsticks:
	$(PYTHON) benchmarks/outside/table.py $(OUTSIDE) $(if $(IMAGES),--images '$(IMAGES)')

.PRECIOUS: .venvs/outside-%/.ready
outside-%: .venvs/outside-%/.ready ;

.venvs/outside-%/.ready: benchmarks/outside/%/install.sh
	$(PYTHON) -m venv .venvs/outside-$*
	sh $< '$(CURDIR)/.venvs/outside-$*' $(SOURCE)
	touch $@

# A site of the docs, the commands and the Python interface in build/site; a broken reference is an error.
site: $(VENV)/.ready-site
	$(BIN)/python -m sphinx -q -W --keep-going docs build/site

# A check of external links: needs the network.
site-links: $(VENV)/.ready-site
	$(BIN)/python -m sphinx -q -b linkcheck docs build/site-links

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venvs $(DECODERS) $(LOWEST) $(CLUSTER) $(ARM) demo-out build docs/reference *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "packer needs Python 3.11 or later"'
	$(PYTHON) -m venv $(VENV)

# The codec is built again if its sources have changed.
$(VENV)/.ready: $(BIN)/python pyproject.toml constraints.txt $(CODEC)
	$(PIP) -e .
	touch $@

$(VENV)/.ready-torch: $(VENV)/.ready
	$(PIP) -e '.[torch]'
	touch $@

# DALI has wheels for Linux on x86_64 and Python 3.11 to 3.14. Elsewhere its tests are skipped.
$(VENV)/.ready-test: $(BIN)/python pyproject.toml constraints.txt tests/requirements-dali.txt $(CODEC)
	$(PIP) -e '.[test]'
	if $(BIN)/python -c 'import platform, sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and \
	    (platform.system(), platform.machine()) == ("Linux", "x86_64")))'; then \
	  $(PIP) --no-deps -r tests/requirements-dali.txt || echo 'DALI could not be installed; its tests are skipped'; \
	fi
	touch $(VENV)/.ready $@

# Triton has wheels for x86_64 on Linux; PyTorch for a GPU installs its own.
$(VENV)/.ready-device: $(VENV)/.ready-test
	$(PIP) -e '.[triton]' 'jax>=0.4.30'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-test
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.ready-site: $(VENV)/.ready-test
	$(PIP) -e '.[site]'
	touch $@

# An environment on top of the tests' environment. tests/cluster/install.sh installs programs that are not Python packages.
$(CLUSTER)/.ready: $(VENV)/.ready-test tests/cluster/install.sh tests/cluster/requirements.txt
	$(PYTHON) -m venv $(CLUSTER)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	  $$($(CLUSTER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth
	$(CLUSTER)/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -r tests/cluster/requirements.txt
	printf '#!/bin/sh\nexec "%s/python" -m packer "$$@"\n' '$(CURDIR)/$(CLUSTER)/bin' > $(CLUSTER)/bin/packer
	chmod +x $(CLUSTER)/bin/packer
	sh tests/cluster/install.sh $(CLUSTER)
	touch $@

# The lowest version of each requirement of the core and of the extras without PyTorch. matplotlib 3.8 calls functions
# that pyparsing 3.3 deprecates, and a warning fails a test.
$(LOWEST)/.ready: pyproject.toml tests/lowest.py
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST_PYTHON) tests/lowest.py parquet urls yolo ilsvrc lmdb report remote > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/pip install -q --disable-pip-version-check --no-compile --only-binary :all: \
	  -r $(LOWEST)/requirements.txt 'pyparsing<3.3' pytest pytest-xdist hypothesis
	$(LOWEST)/bin/pip install -q --disable-pip-version-check --no-compile --no-deps -e .
	touch $@

$(ARM)/.ready: tests/arm/install.sh
	sh tests/arm/install.sh '$(CURDIR)/$(ARM)' $(BIN)/pip
	touch $@

.venvs/%/.ready: examples/trainers/%.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[torch]' pytest
	.venvs/$*/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -r $<
	touch $@

$(DECODERS)/.ready: pyproject.toml constraints-decoders.txt
	$(PYTHON) -m venv $(DECODERS)
	$(DECODERS)/bin/pip install -q --disable-pip-version-check --no-compile -c constraints-decoders.txt -e '.[gpu,torchvision,test]' 'timm>=1.0'
	touch $@
