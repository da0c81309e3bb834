# `make setup | browser | test | demo | lint | envs | clean`.  Everything lives in git-ignored folders of this checkout.
# TORCH may carry pip options, for example a CPU or CUDA wheel index (see README.md, "Choosing a torch build").
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
export COMFYUI

.PHONY: setup browser test demo lint envs clean

setup:
	@$(PYTHON) scripts/setup.py --torch "$(TORCH)" --torchvision "$(TORCHVISION)"

# What tests/browser needs besides: playwright and the system's Chromium. PIPEDIT_SKIP_BROWSER=1 leaves them out.
browser: setup
	@test -n "$$PIPEDIT_SKIP_BROWSER" || $(PYTHON) scripts/setup.py --browser

test: browser
	$(PY) -m pytest tests -m "not gpu" --durations=10

demo: setup
	$(PY) scripts/demo.py --out output/demo

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

envs: setup
	$(PY) tests/envs/check.py

clean:
	rm -rf .venv .comfyui .workers output .pytest_cache .ruff_cache .mypy_cache
