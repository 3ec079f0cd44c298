"""Models of images: read patches.py and grid.py, then vit.py."""
