"""Means over clipped square windows as an op."""
