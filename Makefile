# Everything a person types. Each target sets the environment up first; the second time that costs nothing.
# The first of these that runs: 3.11 is what is tested most.
PYTHON ?= $(or $(firstword $(foreach v,3.11 3.12 3.13 3.14,$(shell python$(v) -c 'print("python$(v)")' 2>/dev/null))),python3.11)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo demo-tune test check oracle bench lab soak soak-memory soak-coordination soak-insiders soak-chaos soak-frames soak-fuzz soak-campaign soak-moves soak-pauses soak-goodput soak-experts soak-stops soak-daemons soak-attack soak-dividing bench-gpu bench-live bench-peers bench-staleness

COMPILED := .venv/.compiled

setup: $(STAMP) $(COMPILED)

# Every file that comes from elsewhere has its SHA-256 in deploy/lock.
LOCKED := $(BIN)/python -m pip install --require-hashes --no-deps

$(STAMP): pyproject.toml deploy/constraints.txt $(wildcard deploy/lock/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	deploy/lock/install.sh $(BIN)/python setup.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $(STAMP)

# The kernels of the search and of the codecs: compiled once, they make the first layout of a run ten seconds sooner.
# Processes that start together without them, as those of a test do, would compile them each for itself. A kernel that was
# compiled beside other versions of its neighbours cannot be loaded: it goes first.
$(COMPILED): $(STAMP) $(wildcard coordinator/allocate/*.py coordinator/cost/*.py) kernels/codec/numba_codec.py
	rm -f coordinator/*/__pycache__/*.nb[ci] kernels/codec/__pycache__/*.nb[ci]
	$(BIN)/python -c 'from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator as Search; Search().prepare()'
	$(BIN)/python -c 'from shoal.kernels.codec import numba_twin; numba_twin.wait()'
	touch $@

# A swarm of six peers on this machine. ARGS='--json out.jsonl' and the like go to `shoal demo`.
demo: setup
	$(BIN)/shoal demo $(ARGS)

# A base, then adapters beside it on another text, and the losses of both: some ten minutes. ARGS=--long for an hour or more.
demo-tune: setup
	$(BIN)/python tests/bench/tune.py $(ARGS)

# The whole suite on two cores: real peers on one, the rest beside them. ARGS='-m "not process"' leaves the former out.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Does the working tree still do what BASE did? Plays both side by side and says where they part: a quarter of an hour on
# two cores. ARGS='--only planner golden' for less, ARGS='--cases 2' for two cases of each section.
oracle: setup
	$(BIN)/python tests/oracle/oracle.py $(or $(BASE),HEAD) $(ARGS)

bench: setup
	@set -e; for script in $(filter-out $(addprefix tests/bench/,gpu.py live_swarm.py peers.py hivemind_trainer.py tune.py),$(wildcard tests/bench/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script $(ARGS); done
	@echo "== tests/bench/live_swarm.py takes an hour: make bench-live; half an hour, as root: make bench-peers; what needs a card: make bench-gpu"

# What a CUDA card reaches of what it can do: a table, and gpu.json. No card has run it yet. ARGS='--only layers' for a part.
bench-gpu: setup
	$(BIN)/python tests/bench/gpu.py $(ARGS)

# Scenarios of tests/lab/ with real peers on an emulated internet, and simulated: two hours as root, on a machine that does
# nothing else. ARGS='small two-nats' for those, ARGS='--virtual-only six-homes' where no namespaces can be made.
lab: setup
	$(BIN)/python -m pytest -q tests/lab/internet
	$(BIN)/python tests/lab/run.py $(ARGS)

# What swarms that decide by themselves reach of what is planned for them, an hour. ARGS='scenarios --only six-equal' for less.
bench-live: setup
	$(BIN)/python tests/bench/live_swarm.py $(ARGS)

# Beside what volunteers would use instead: shoal, hivemind's Optimizer and one machine alone on the same emulated internet,
# half an hour as root on a machine that does nothing else. ARGS='--model 1m --cores 0 --seconds 120 --only shoal' for less.
bench-peers: setup
	$(BIN)/python tests/bench/peers.py $(ARGS)

# What staleness costs and what makes up for it, many hours on all cores; goes on where it was stopped. ARGS=--short for
# five minutes, ARGS='--only c-adamw' for a table, ARGS=--list to see what is missing.
bench-staleness: .venv/.study
	$(BIN)/python -m pytest -q tests/bench/staleness
	$(BIN)/python tests/bench/staleness/study.py $(ARGS)

# The rated sentences are in the source distribution only.
.venv/.study: $(STAMP)
	$(LOCKED) --no-build-isolation -r deploy/lock/study.txt
	$(BIN)/python -m pip download --require-hashes --no-deps --no-build-isolation --no-binary :all: \
	  -d .venv/share/staleness -r deploy/lock/rated.txt
	touch $@

# All of them, a working day on two cores.
soak: soak-stops soak-daemons soak-memory soak-coordination soak-insiders soak-frames soak-fuzz soak-campaign soak-moves soak-pauses soak-chaos soak-goodput soak-attack soak-experts soak-dividing

# Thirty minutes of demo; says how each peer's memory grew.
soak-memory: setup
	$(BIN)/python tests/soak/memory.py $(ARGS)

# Ten thousand small swarms of coordinators under every fault at once. ARGS='--seeds 500' for less.
soak-coordination: setup
	$(BIN)/python tests/soak/coordination.py $(ARGS)

# A thousand small swarms in each of which one member lies. ARGS='--seeds 100' for less.
soak-insiders: setup
	$(BIN)/python tests/soak/insiders.py $(ARGS)

# A million frames with flipped bits through the codec, two minutes. ARGS=20000 for less.
soak-frames: setup
	$(BIN)/python tests/soak/frames.py $(ARGS)

# Ten million messages, plans and files that are nearly right, an hour or two; goes on where it was stopped. With Atheris,
# which follows coverage, where that installs. ARGS='--executions 100000 --only plans' for less.
soak-fuzz: setup
	-$(LOCKED) -q --only-binary :all: -r deploy/lock/fuzz.txt
	$(BIN)/python tests/soak/fuzz.py $(ARGS)

# Five hundred whole swarms in virtual time, each broken in its own way, hours. ARGS='--seeds 20' for less.
soak-campaign: setup
	$(BIN)/python tests/soak/campaign.py $(ARGS)

# A hundred swarms in which members move all the time while others die, an hour. ARGS='--seeds 10' for less.
soak-moves: setup
	$(BIN)/python tests/soak/moves.py $(ARGS)

# 500 swarms in virtual time whose stages change all the time while peers die, two hours of one core.
soak-dividing: setup
	$(BIN)/python tests/soak/dividing.py $(ARGS)
	$(BIN)/python tests/soak/dividing.py --experts 4 --peers 5 --seeds 100 --steps 30 $(ARGS)
	$(BIN)/python tests/soak/dividing.py --tied --seeds 100 $(ARGS)

# Two hundred swarms in which up to half of the peers pause and come back, a quarter of an hour. ARGS='--seeds 10' for less.
soak-pauses: setup
	$(BIN)/python tests/soak/pauses.py $(ARGS)

# `shoal demo --chaos` twenty times against one run in peace: what faults cost. ARGS='--runs 2 --seconds 90' for less.
soak-chaos: setup
	$(BIN)/python tests/soak/chaos.py $(ARGS)

# Sixteen simulated peers, one killed every minute: steps/s against what the survivors can do.
soak-goodput: setup
	$(BIN)/python tests/soak/goodput.py $(ARGS)

# Ten thousand settings of experts on up to 12 nodes: promises kept, neither rule ever better. ARGS='--settings 500' for less.
soak-experts: setup
	$(BIN)/python tests/soak/experts.py $(ARGS)

# Real peers told to stop in every order and started again, ten minutes: where does the run go on? ARGS='--power-s 0' for less.
soak-stops: setup
	$(BIN)/python tests/soak/stops.py $(ARGS)

# Two real peers whose network daemons are killed and suspended at any moment, five minutes: each time they are back within 35 s.
soak-daemons: setup
	$(BIN)/python tests/soak/daemons.py $(ARGS)

# Six real peers in peace and then under every attack that a stranger knows, half an hour. ARGS='--only false_mate --peace 20
# --seconds 30' for one of them by itself.
soak-attack: setup
	$(BIN)/python tests/soak/attack.py $(ARGS)
