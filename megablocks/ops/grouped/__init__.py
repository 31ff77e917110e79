"""Products over a ragged number of rows an expert."""

TILE_ROWS = 128
"""Rows of the tallest tile that any of these products, and of the fused ones, cuts an expert's rows into.

Loads in multiples of it leave no tile in part; lower tiles divide it.
"""
