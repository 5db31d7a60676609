"""KVPP and the connectors on vLLM 0.23, in an environment of their own: `make test-vllm023`."""
