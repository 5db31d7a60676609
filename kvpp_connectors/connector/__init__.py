"""What every KV connector of this package needs."""
