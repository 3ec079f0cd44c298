"""Text files -> tokens -> batches of similar length; and a corpus that the package makes itself."""
