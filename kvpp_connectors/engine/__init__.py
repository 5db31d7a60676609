"""KVPP inside vLLM: the launch check, the worker classes, and the seams they use."""
