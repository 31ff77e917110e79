"""Grouped products that gather and scatter rows in their own loads and stores (ScatterMoE, arXiv 2403.08245)."""
