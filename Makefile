# Both targets set up everything they need in .venv; Python 3.11 or newer is all that must be there.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test oldest clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m captioner demo

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

# The oldest versions of all libraries that pyproject.toml admits. Theirs are the deprecations.
TESTS ?= tests
oldest: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/uv venv --quiet --clear --python $(VENV)/bin/python $(VENV)-oldest
	VIRTUAL_ENV=$(VENV)-oldest $(VENV)/bin/uv pip install --quiet --resolution lowest-direct --editable ".[dev]"
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile -m "not slow" -W ignore::DeprecationWarning $(TESTS)

# The mark is written last, so that an installation that failed is tried again.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --editable ".[dev]"
	touch $(VENV)/installed

clean:
	rm -rf $(VENV) $(VENV)-oldest build *.egg-info .mypy_cache .pytest_cache .ruff_cache
