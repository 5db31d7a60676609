"""Stores that hold the pool's objects."""
