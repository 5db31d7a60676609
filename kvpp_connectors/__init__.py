"""KVPP and KVPP-aware KV connectors as a plug-in for stock vLLM."""
