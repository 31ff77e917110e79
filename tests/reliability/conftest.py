"""Each test may launch the training driver; see fixtures.py and driver.py."""

from fixtures import driver, tiny_data, zygote  # noqa: F401
