"""Supports, values, factors, closed forms: the linear algebra of every quantity."""
