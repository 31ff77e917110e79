"""Products over a ragged number of rows an expert."""

TILE_ROWS = 128
"""Rows of the tallest tile into which these products, and the fused ones, cut an expert's rows.

Lower tiles divide it, so an expert with a multiple of it has no tile in part.
"""
