"""Faults on purpose: a suite does what really happens to programs, and counts what came of it."""
