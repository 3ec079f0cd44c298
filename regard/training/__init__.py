"""Training: checkpoint.py keeps what a run needs to go on, safe from crashes, full disks and flipped bits."""
