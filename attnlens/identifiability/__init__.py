"""Families of attention that give the same output: their dimensions, and members as witnesses."""
