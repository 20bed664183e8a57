# Two commands on a fresh machine: make demo, make test. Every line here can be typed by hand; README.md shows them.
# Only the CPU build of torch: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu      Another Python: make demo PYTHON=python3.12
# Tests run in two processes of one thread; with more cores: make test JOBS=8
PYTHON ?= python3
DEMO ?= out/demo
JOBS ?= 2
PY = .venv/bin/python
GO_ON = $(if $(wildcard $(DEMO)/$(1)/step-*),--init_from=resume)

.PHONY: demo test test-all bench

demo: .venv/demo
	$(PY) train.py config/demo.toml --out_dir=$(DEMO)/rope $(call GO_ON,rope)
	$(PY) extend.py $(DEMO)/rope --method=none --factor=4 --max_iters=60 --out_dir=$(DEMO)/rope-none4 $(call GO_ON,rope-none4)
	$(PY) extend.py $(DEMO)/rope --method=yarn --factor=4 --max_iters=0 --out_dir=$(DEMO)/rope-yarn4-zero $(call GO_ON,rope-yarn4-zero)
	$(PY) extend.py $(DEMO)/rope --method=yarn --factor=4 --max_iters=60 --out_dir=$(DEMO)/rope-yarn4 $(call GO_ON,rope-yarn4)
	$(PY) sample.py $(DEMO)/rope-yarn4 --start="def " --max_new_tokens=800
	$(PY) evaluate.py "untouched=$(DEMO)/rope" "untouched + fine-tune=$(DEMO)/rope-none4" "YaRN zero-shot=$(DEMO)/rope-yarn4-zero" \
		"YaRN + fine-tune=$(DEMO)/rope-yarn4" --lengths=256,512,1024,2048 --protocol=last-quarter --plot=$(DEMO)/length.png --json=$(DEMO)/length.json

test: .venv/test
	$(PY) -m pytest -q tests -n $(JOBS) --dist=worksteal

test-all: .venv/test
	$(PY) -m pytest -q tests -n $(JOBS) --dist=worksteal --all

bench: .venv/demo
	$(PY) experiments/bench.py

.venv/demo: requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("error: nanoLong needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12, say" % sys.version_info[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module: install it, as in apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PY) -m pip install -q --index-url $(TORCH_INDEX) torch==2.13.0)
	$(PY) -m pip install -q -r requirements.txt matplotlib
	@touch $@

.venv/test: .venv/demo requirements-dev.txt
	$(PY) -m pip install -q -r requirements-dev.txt
	@touch $@
