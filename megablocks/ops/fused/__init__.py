"""Ops that keep less for backward than their parts would."""
