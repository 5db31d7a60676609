"""Ownership, scratch and broadcast of KV caches: the core of KVPP. Imports torch, never vLLM."""
