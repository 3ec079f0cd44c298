"""What stacks into models: attention, feed-forward layers and position schemes, one registered class a file."""
