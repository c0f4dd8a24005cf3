# make demo   sets itself up and runs the main job: measure → fit → predict → report (on the GPU if there is one)
# make test   sets itself up and passes the tests
# make readme rebuilds what is published: fits, reports, the generated blocks of README.md, docs/ and the sweep files
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= out/demo

.PHONY: demo test test-gpu readme lint clean

demo: $(VENV)/.ready
	$(BIN)/vramprobe run configs/sweeps/quickstart.yaml --out $(DEMO)
	$(BIN)/vramprobe fit $(DEMO) --out $(DEMO)/fit.json
	$(BIN)/vramprobe predict --model smollm2-360m --method qlora --batch-size 1 --seq-len 128 --fit $(DEMO)/fit.json
	$(BIN)/vramprobe report $(DEMO) --fit $(DEMO)/fit.json --out $(DEMO)/report

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist loadfile

test-gpu: $(VENV)/.ready
	$(BIN)/python -m pytest -m gpu

readme: $(VENV)/.ready
	$(BIN)/python benchmarks/reports.py
	$(BIN)/python benchmarks/planned.py
	$(BIN)/python benchmarks/readme.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Torch first and exactly: a looser request may fetch another build of several gigabytes.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vramprobe needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[measure,liger,hub,test]'
	@touch $@

clean:
	rm -rf $(VENV) out
