"""Token to expert bookkeeping."""
