"""The conformance suite: what proves an attention mechanism, a feed-forward layer or a position scheme."""
