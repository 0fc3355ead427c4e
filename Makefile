UI_PORT ?= 5000
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANS_REFERENCE ?= $(abspath ../shared)
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: help setup demo agent online test check format lock dvc docs pictures server deploy ui clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | sort

setup: .venv/.stamp  ## virtual environment with locked dependencies

.venv/.stamp: constraints.txt requirements/core.txt requirements/pipeline.txt requirements/dev.txt pyproject.toml setup.sh
	./setup.sh
	@touch $@

demo: setup  ## the whole pipeline: make demo [PROFILE=quick|tiny|smoke]
	$(BIN)/ans profile $(or $(PROFILE),quick) --if-needed
	$(BIN)/ans run

agent: setup  ## the pixel-space agent, after or instead of the demo: make agent [PROFILE=tiny|smoke]
	$(BIN)/ans profile $(or $(PROFILE),tiny) --if-needed
	$(BIN)/ans run --agent

online: setup  ## learning online, simulated; makes what it needs of the agent: make online [PROFILE=tiny|smoke]
	$(BIN)/ans profile $(or $(PROFILE),tiny) --if-needed
	$(BIN)/ans run --online

# Where it is set (as in many containers), each process compiles tests and package anew: 7 s of 17.
test check: export PYTHONDONTWRITEBYTECODE :=

test: setup  ## every test, also the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder  # two more than the cores: many tests wait

check: setup  ## lint, types, import contracts, fast tests (two minutes)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 -q

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dvc: setup  ## write dvc.yaml from tasks/stages.py, and docs/settings.md
	$(BIN)/python -m tasks.deps --write
	$(BIN)/python -m tasks.settings_page

lock: setup  ## write constraints.txt from the installed environment
	{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' | grep -v ' @ '; } > constraints.new && mv constraints.new constraints.txt

pictures: setup  ## the README's picture, of a run of the pipeline: make pictures [PROFILE=quick|tiny]
	$(BIN)/python -m perf.pictures runs/$(or $(PROFILE),quick)

docs: setup  ## the site of docs/ in site/, links checked
	$(BIN)/python -m mkdocs build --strict

server: setup  ## Prefect server and a process worker, for deployments
	$(BIN)/ans server

deploy: setup  ## register the deployments of prefect.yaml with the server at PREFECT_API_URL (key in PREFECT_API_AUTH_STRING)
	$(BIN)/python -m flows.launch

ui: setup  ## MLflow in the browser: make ui [UI_PORT=5000]
	$(BIN)/python -m flows.services $(UI_PORT)

clean:  ## resume states, logs and tool caches; keeps .venv, runs, the DVC cache and the MLflow history
	rm -rf .ans/scratch .ans/logs .ans/finetune-* .ans/rl-* .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build dist site
