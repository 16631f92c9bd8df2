# Everything here works on a fresh machine with python3 (3.11 or newer), make and, for the demo and the Spark tests,
# Java 17. The first target that needs it creates .venv and installs the pinned versions of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
ROWS   ?=
BROKERS ?=
SEED   ?=
ARGS   ?=
MINUTES ?=
# Of a hunt: large, or small as CI takes it. tests/doses.py says how much that is.
DOSE   ?= large
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(PROCESSORS) + 4)
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
          $(BIN)/python -m pip install --no-input
PYTEST := $(BIN)/python -m pytest -q
# A test may take longer than the ten minutes after which pytest ends one that hangs.
UNHURRIED := -o faulthandler_timeout=0
# Tests wait for most of their time, so there are four processes more than there are processors. Each takes up to 1 GB.
# A process that dies (pytest ends one whose test hangs) is replaced once, and its test is tried again: not for ever.
SPREAD := -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart=1
# What a small dose tries is what `make test` does not.
HUNT   := TIDELOG_DOSE=$(DOSE) $(PYTEST) $(if $(filter small,$(DOSE)),-m hunt)
# What is tried on Kafka too.
BESIDE_KAFKA := tests/compatibility tests/cluster/test_client_node.py tests/golden
# Where every test is slow, make check need not look.
ALL_SLOW := compatibility demo packaging spark
SIMULATIONS := tests/simulation tests/unit/replication/quorum/test_raft_simulation.py
# Tests start hundreds of processes that import the same modules; whatever the shell says, each is compiled once.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test check check-code check-tests format bench clients \
        bench-report hunt sim kill-test damage cluster-test transactions spark-chaos compat compat-table fuzz properties other-hunts build clean

help:
	@echo "make demo       flights through a broker, a consumer group and Spark (ROWS=0.1 takes a tenth; BROKERS=3: a cluster)"
	@echo "make check      format, lint, strict types, import contracts, fast tests (two minutes on two processors)"
	@echo "make test       every test but the hunts (six to nine minutes on two processors)"
	@echo "make format     rewrite the code in the house format"
	@echo "make bench      measure Tidelog beside Apache Kafka"
	@echo "make bench-report  all benchmark scenarios as one HTML page (ARGS=--quick shows that all runs)"
	@echo "make hunt       all hunts below, for hours; DOSE=small takes minutes of them"
	@echo "make clients    install the stock clients of make compat that are not Python's: npm, go, javac, apt"
	@echo "make compat     stock clients and Kafka's own tools against Tidelog"
	@echo "make kill-test  a hundred hard kills of a node with a producer running"
	@echo "make cluster-test  200 faults in a cluster of seven, 50 failovers, the named cases of replication"
	@echo "make damage     files of one replica or of two damaged under clients, a hundred cases"
	@echo "make transactions  random transactions of several clients, every history judged"
	@echo "make chaos      pipelined producers under kills and pauses, Java's too (MINUTES=5 RUNS=20)"
	@echo "make spark-chaos  a Spark job from topic to topic, killed at every step, and its brokers (MINUTES=5)"
	@echo "make sim        simulated disks and clusters (SEED=7 replays one run)"
	@echo "make fuzz       coverage-guided fuzzing (MINUTES=60), then make properties"
	@echo "make properties properties tried much harder than in make test"
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
	@echo "Installing Tidelog and what the demo needs (Spark, Arrow, numba, matplotlib: some minutes) into $(VENV) ..."
	@$(PIP) -e '.[demo]'
	@touch $@

# The same and the developer's tools.
$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Tidelog and the developer's tools (Spark, stock clients, checkers: some minutes) into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo-installed $@

demo: $(VENV)/.demo-installed
	@$(BIN)/python -m tidelog.bench.demo $(if $(ROWS),--rows $(ROWS)) $(if $(BROKERS),--brokers $(BROKERS)) $(ARGS)

test: $(VENV)/.dev-installed
	HYPOTHESIS_PROFILE=full $(PYTEST) $(SPREAD) -m "not hunt" --durations=10 $(ARGS)

check: $(VENV)/.dev-installed
	@$(MAKE) --no-print-directory -j2 check-tests check-code

check-code: $(VENV)/.dev-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

check-tests: $(VENV)/.dev-installed
	$(PYTEST) $(SPREAD) -m "not slow and not hunt" $(addprefix --ignore=tests/,$(ALL_SLOW)) $(ARGS)

format: $(VENV)/.dev-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-installed
	$(BIN)/python -m tidelog.bench compare $(ARGS)

bench-report: $(VENV)/.dev-installed
	$(BIN)/python -m tidelog.bench report $(ARGS)

# Hunts try the same again and again, or need programs that are not Python's. Those that measure time run by themselves.
hunt: sim kill-test damage cluster-test transactions compat fuzz other-hunts

chaos: $(VENV)/.dev-installed
	TIDELOG_CHAOS_MINUTES=$(or $(MINUTES),5) TIDELOG_CHAOS_RUNS=$(or $(RUNS),20) \
	  $(PYTEST) $(UNHURRIED) -s tests/cluster/test_producer_epochs.py $(ARGS)

spark-chaos: $(VENV)/.dev-installed
	TIDELOG_SPARK_CHAOS_MINUTES=$(or $(MINUTES),5) $(PYTEST) $(UNHURRIED) -s tests/spark/test_exactly_once_chaos.py $(ARGS)

sim: $(VENV)/.dev-installed
	$(if $(SEED),TIDELOG_SEED=$(SEED)) $(HUNT) $(SPREAD) $(SIMULATIONS) $(ARGS)

kill-test: $(VENV)/.dev-installed
	$(HUNT) -s tests/cluster/test_kill_restart.py $(ARGS)

damage: $(VENV)/.dev-installed
	$(if $(SEED),TIDELOG_SEED=$(SEED)) $(HUNT) $(SPREAD) tests/cluster/test_damage.py $(ARGS)

cluster-test: $(VENV)/.dev-installed
	$(HUNT) -s tests/cluster $(addprefix --ignore=tests/cluster/,test_kill_restart.py test_damage.py) $(ARGS)

transactions: $(VENV)/.dev-installed
	$(if $(SEED),TIDELOG_SEED=$(SEED)) $(HUNT) -s tests/transactions $(ARGS)

# In the small dose Tidelog alone, with the clients and tools that are installed; else Kafka beside it.
compat: $(VENV)/.dev-installed
	$(if $(filter small,$(DOSE)),$(HUNT) $(SPREAD),TIDELOG_COMPAT_KAFKA=1 $(HUNT)) $(BESIDE_KAFKA) $(ARGS)

fuzz: $(VENV)/.dev-installed
	$(BIN)/python -m tests.fuzz.run --minutes $(or $(MINUTES),$(if $(filter small,$(DOSE)),1,10)) $(ARGS)
	@$(MAKE) --no-print-directory properties

properties: $(VENV)/.dev-installed
	HYPOTHESIS_PROFILE=deep TIDELOG_DOSE=$(DOSE) $(PYTEST) $(SPREAD) tests/properties

# So that no hunt is forgotten; 5 says that there is none but those above.
other-hunts: $(VENV)/.dev-installed
	TIDELOG_DOSE=$(DOSE) $(PYTEST) $(UNHURRIED) -m hunt $(addprefix --ignore=,$(SIMULATIONS) tests/cluster tests/transactions tests/compatibility tests/properties) || [ $$? -eq 5 ]

clients: $(VENV)/.dev-installed
	@$(BIN)/python -m tests.compatibility.clients.install

compat-table: $(VENV)/.dev-installed
	TIDELOG_COMPAT_TABLE=write $(PYTEST) tests/compatibility/test_client_matrix.py

build: $(VENV)/.dev-installed
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-out bench-out
