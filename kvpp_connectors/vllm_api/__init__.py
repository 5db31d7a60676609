"""What this package uses of vLLM and vllm-ascend, by name."""
