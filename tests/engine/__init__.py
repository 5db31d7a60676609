"""KVPP in real vLLM engines."""
