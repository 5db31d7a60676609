"""AscendStoreConnector: a prefix cache that engines share."""
