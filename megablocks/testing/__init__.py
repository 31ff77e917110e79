"""Helpers for tests of this package and of programs that build on it; nothing in the package imports them."""
