"""KVPP on vLLM for CPU."""
