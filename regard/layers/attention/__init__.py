"""Attention mechanisms: one file each. Read base.py, then softmax.py."""
