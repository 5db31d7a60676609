"""The contracts around KVPP: what a launch may say, and what vLLM must offer."""
