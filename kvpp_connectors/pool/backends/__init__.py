"""The stores that can hold the pool, behind one contract."""
