"""Products over a ragged number of rows per expert."""

TILE_ROWS = 128
"""Rows of the tallest tile into which these products, and the fused ones, split an expert's rows.

Lower tiles divide it, so an expert whose rows are a multiple of it has no partial tile.
"""
