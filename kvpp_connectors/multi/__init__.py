"""MultiConnector: vLLM's own, with children that understand ownership."""
