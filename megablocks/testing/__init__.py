"""Helpers for tests of this package and of programs that use it. No other folder of the package imports them."""
