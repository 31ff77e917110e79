"""Spreading experts over ranks: process groups, the all-to-all, and the token dispatchers."""
