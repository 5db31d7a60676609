"""`kvpp proxy` between stub back-ends that fail in every way they can."""
