"""May this launch run? One call: validate."""
