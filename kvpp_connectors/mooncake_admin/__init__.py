"""Mooncake's servers, started and asked."""
