"""KVPP on vllm-ascend."""
