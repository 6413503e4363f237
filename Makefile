# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

# pip compiles nothing (--no-compile), so let the first import keep its bytecode: where it may not,
# every process compiles torch and transformers again (10 s instead of 4).
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test bench browser pictures clean

demo: $(READY)
	$(BIN)/ffmem demo

test: $(READY) browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "mypy beside pytest -n 2" # it leaves a core idle for more than a minute
	@$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types && exit $$tests

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

# The explorer is tested in a real browser: Debian's, if there is none yet and it can be installed.
browser:
	@command -v chromium || command -v google-chrome || test -n "$$FFMEM_BROWSER" || \
	(SUDO=$$(test "$$(id -u)" = 0 || echo "sudo -n"); command -v apt-get && \
	$$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium) || \
	echo "No browser was found or installed: the tests that need one will say that they were skipped."

pictures: $(READY) browser
	PYTHONPATH=. $(BIN)/python docs/pictures.py demo

bench: $(READY)
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv
