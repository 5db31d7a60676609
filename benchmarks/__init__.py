"""Benchmarks, soak and traces of this project; not in the wheel."""
