.PHONY: check test test-all mutants site release smoke clean

check:
	bash scripts/check.sh

test:
	bash scripts/test.sh

test-all:
	bash scripts/test.sh --all

mutants:
	bash scripts/mutants.sh

site:
	bash scripts/site.sh

release:
	bash scripts/release_check.sh

smoke:
	bash exp/smoke/dmoe.sh

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
