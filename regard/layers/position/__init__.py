"""Position schemes: one file each. Read base.py, then alibi.py."""
