"""MultiConnector over MooncakeConnectorV2 and AscendStoreConnector."""
