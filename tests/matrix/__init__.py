"""KVPP on against KVPP off, for every combination that vLLM runs on CPU."""
