"""Traces of engine steps: recording, Chrome events, figures, pictures."""
