"""Random traffic through a deployment while its engines are killed."""
