"""Products over a ragged number of rows an expert."""
