"""Pictures of a step."""
