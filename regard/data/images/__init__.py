"""Labelled images: files -> pixels, what is random about them, and batches."""
