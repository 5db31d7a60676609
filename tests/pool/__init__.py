"""The pool: keys, packing, every backend through one suite, lookups, faults."""
