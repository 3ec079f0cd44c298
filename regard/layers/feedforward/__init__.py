"""Feed-forward layers: one file each. Read base.py, then dense.py."""
