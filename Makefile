# Everything here works on a fresh machine with python3 (3.11 or newer), make and, for the demo and the Spark tests,
# Java 17. The first target that needs it creates .venv and installs the pinned versions of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
ROWS   ?=
BROKERS ?=
SEED   ?=
ARGS   ?=
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
          $(BIN)/python -m pip install --quiet --no-input
FAST   := -m "not slow" -q

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench clients compat compat-table kill-test cluster-test sim fuzz build clean

help:
	@echo "make demo       flights through a broker, a consumer group and Spark (ROWS=0.1 takes a tenth; BROKERS=3: a cluster)"
	@echo "make test       every test, the slow ones too"
	@echo "make check      format, lint, strict types, import contracts, fast tests"
	@echo "make format     rewrite the code in the house format"
	@echo "make bench      measure Tidelog beside Apache Kafka"
	@echo "make clients    install the stock clients of make compat that are not Python's: npm, go, javac, apt"
	@echo "make compat     stock clients and Kafka's own tools against Tidelog"
	@echo "make kill-test  a hundred hard kills of a node with a producer running"
	@echo "make cluster-test  200 faults in a cluster of seven, 50 failovers, the named cases of replication"
	@echo "make sim        simulated disks and clusters (SEED=7 replays one run)"
	@echo "make fuzz       coverage-guided fuzzing (MINUTES=60), then properties tried much harder than in make test"
	@echo "make build      wheel and sdist in dist/"
	@echo "make clean      remove .venv and everything built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Tidelog needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: '$(PYTHON)' cannot create virtual environments. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What the demo needs.
$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Tidelog and what the demo needs into $(VENV) ..."
	@$(PIP) -e '.[demo]'
	@touch $@

# The same and the developer's tools.
$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Tidelog and the developer's tools into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo-installed $@

demo: $(VENV)/.demo-installed
	@$(BIN)/python -m tidelog.bench.demo $(if $(ROWS),--rows $(ROWS)) $(if $(BROKERS),--brokers $(BROKERS)) $(ARGS)

test: $(VENV)/.dev-installed
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -q --durations=10 $(ARGS)

check: $(VENV)/.dev-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest $(FAST) $(ARGS)

format: $(VENV)/.dev-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-installed
	$(BIN)/python -m tidelog.bench compare $(ARGS)

compat: $(VENV)/.dev-installed
	TIDELOG_COMPAT_KAFKA=1 $(BIN)/python -m pytest -q tests/compatibility tests/cluster/test_client_node.py $(ARGS)

clients: $(VENV)/.dev-installed
	@$(BIN)/python -m tests.compatibility.clients.install

compat-table: $(VENV)/.dev-installed
	TIDELOG_COMPAT_TABLE=write $(BIN)/python -m pytest -q tests/compatibility/test_client_matrix.py

kill-test: $(VENV)/.dev-installed
	TIDELOG_KILLS=100 $(BIN)/python -m pytest -q tests/cluster/test_kill_restart.py $(ARGS)

cluster-test: $(VENV)/.dev-installed
	TIDELOG_FAULTS=200 TIDELOG_FAILOVERS=50 $(BIN)/python -m pytest -s -q tests/cluster --ignore tests/cluster/test_kill_restart.py $(ARGS)

sim: $(VENV)/.dev-installed
	$(if $(SEED),TIDELOG_SEED=$(SEED)) $(BIN)/python -m pytest -q tests/simulation $(ARGS)

fuzz: $(VENV)/.dev-installed
	$(BIN)/python -m tests.fuzz.run --minutes $(or $(MINUTES),10) $(ARGS)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -q tests/properties

build: $(VENV)/.dev-installed
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-out bench-out
