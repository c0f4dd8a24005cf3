# make demo   sets itself up and runs the main job: run, predict, report (on a GPU it measures and fits, too)
# make test   sets itself up and passes the tests: every behavior, in about 10 minutes on two cores
# make test-all  the same, then the exhaustive grids: every case of what a few stand for in make test
# make truth  repeats ten published runs by their own libraries on an emulated GPU and rebuilds their table
# make docs   builds the documentation site, links checked: out/site/html/index.html
# make readme rebuilds what is published: reports, the generated blocks of README.md, docs/ and the sweep files
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= out/demo
# Tests start hundreds of interpreters: what these compile is kept, whatever the machine's default (a sixth of the time).
TESTS  := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache $(BIN)/python -m pytest

.PHONY: demo demo-emulated demo-gpu demo-here test test-all test-exhaustive truth test-gpu readme docs wheels lint clean

# On the GPU if there is one; else on an emulated one, at real sizes; else (no compiler, not Linux) on the CPU, small.
demo: $(VENV)/.ready
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then $(MAKE) --no-print-directory demo-gpu; \
	elif $(BIN)/vramprobe emulate setup; then $(MAKE) --no-print-directory demo-emulated; \
	else echo "no GPU can be emulated here (above): the small cells run on the CPU"; $(MAKE) --no-print-directory demo-here; fi

demo-emulated: $(VENV)/.ready
	$(BIN)/vramprobe run configs/sweeps/emulated.yaml --emulate H200 --out $(DEMO)-emulated
	$(BIN)/vramprobe predict --model llama-3.1-70b --method qlora --gradient-checkpointing --batch-size 1 --seq-len 4096 \
	  --gpu H200
	$(BIN)/vramprobe report $(DEMO)-emulated --out $(DEMO)-emulated/report

demo-gpu: $(VENV)/.ready
	$(BIN)/vramprobe run configs/sweeps/calibrate-gpu.yaml --out $(DEMO)
	$(BIN)/vramprobe fit $(DEMO) --out $(DEMO)/fit.json
	$(BIN)/vramprobe predict --model smollm2-360m --method qlora --batch-size 2 --seq-len 2048 --fit $(DEMO)/fit.json
	$(BIN)/vramprobe report $(DEMO) --fit $(DEMO)/fit.json --out $(DEMO)/report

# The CPU is measured and not predicted.
demo-here: $(VENV)/.ready
	$(BIN)/vramprobe run configs/sweeps/quickstart.yaml --device cpu --out $(DEMO)-cpu
	$(BIN)/vramprobe report $(DEMO)-cpu --out $(DEMO)-cpu/report

# With what an emulated GPU needs, where it can be had: without it its tests are skipped, and say so.
test: $(VENV)/.ready
	@$(BIN)/vramprobe emulate setup || echo "no GPU can be emulated here (above): its tests are skipped"
	$(TESTS) -n auto --dist worksteal

test-all: test test-exhaustive

# Where VRAMPROBE_TESTS_UNTIL names a time (seconds since 1970), no test begins later: it is skipped, and counted.
test-exhaustive: $(VENV)/.ready
	$(TESTS) -n auto --dist worksteal -m 'exhaustive and not gpu'

# Ten published runs again, of every stack, and the table from the records. A stack is set up where it is not there yet.
truth: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/python benchmarks/truth/reproduce.py --rerun 10 --uv $(BIN)/uv
	$(BIN)/python benchmarks/truth/reproduce.py --table
	$(BIN)/python benchmarks/truth/reproduce.py --check

test-gpu: $(VENV)/.ready
	$(TESTS) -m gpu

readme: $(VENV)/.ready
	$(BIN)/python tools/reports.py
	$(BIN)/python tools/planned.py
	$(BIN)/python tools/readme.py

docs: $(VENV)/.ready
	$(BIN)/python tools/site.py

# The wheels of a release for every platform, cross-built and checked, in dist/.
wheels: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[wheels]'
	$(BIN)/python tools/wheels.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --output-format min-text

# Torch first and exactly: a looser request may fetch another build of several gigabytes.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(wildcard vramprobe/allocator/plain/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vramprobe needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,measure,liger,hub,emulate,mcp,test,docs]'
	@touch $@

clean:
	rm -rf $(VENV) out
