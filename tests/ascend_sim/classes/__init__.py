"""vllm-ascend 0.23's own classes over the simulated NPU."""
