"""Models around the mechanisms: transformer.py."""
