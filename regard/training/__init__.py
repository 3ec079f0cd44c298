"""Training: the loop, its settings, and run folders that survive crashes, full disks and flipped bits."""
