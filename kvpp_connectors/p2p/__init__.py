"""MooncakeConnectorV2: prefill/decode disaggregation, decode pulls (docs/p2p_protocol.md)."""
