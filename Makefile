# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/runs
READY := .venv/ready

# pip compiles nothing (--no-compile), so let the first import keep its bytecode: where it may not,
# every process compiles torch and transformers again (10 s instead of 4).
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test docs notebooks dist bench browser pictures clean

demo: $(RUNS)
	$(BIN)/ffmem demo

test: $(READY) browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "mypy beside pytest -n 3" # browsers, Ray and killed workers are waited for: fill the cores
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest --collect-only -q > /dev/null; : compiles all once, not in each worker; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types && exit $$tests

# What the demo needs, then all extras and tools.
INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt

$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[models]'
	touch $(RUNS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[dev]'
	touch $(RUNS) $(READY)

# The documentation site. Warnings are errors; `make test` builds it too, and checks every link in it.
docs: $(READY)
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . docs/_build/html
	@echo "The site is at docs/_build/html/index.html"

# Run the notebooks and keep their outputs; the index of the first serves all.
notebooks: $(READY)
	PYTHONWARNINGS=ignore:IProgress $(BIN)/jupyter execute --inplace $(addprefix examples/,quick-start.ipynb one-memory.ipynb figure-4.ipynb edit-a-checkpoint.ipynb)

# Wheel and sdist, ready to upload.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# The explorer is tested in a real browser: Debian's, if there is none yet and it can be installed.
browser:
	@command -v chromium || command -v google-chrome || test -n "$$FFMEM_BROWSER" || \
	(SUDO=$$(test "$$(id -u)" = 0 || echo "sudo -n"); command -v apt-get && \
	$$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium) || \
	echo "No browser was found or installed: the tests that need one will say that they were skipped."

pictures: $(READY) browser
	PYTHONPATH=. $(BIN)/python docs/pictures.py demo

bench: $(READY)
	$(INSTALL) -e '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv docs/_build
