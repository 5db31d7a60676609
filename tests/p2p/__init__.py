"""MooncakeConnectorV2: the protocol in parts, and between real engines."""
