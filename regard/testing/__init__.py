"""The conformance suite: what proves an attention mechanism, a feed-forward layer or a position scheme.

    python -m regard.testing retention

runs every check on a mechanism: a word of `regard list`, or one's own as `mypackage.retention:Retention`. Flags of
pytest may follow, such as `-x` or `-k causality`. With pytest itself it is

    pytest -p regard.testing.plugin --pyargs regard.testing --regard-mechanism retention

A check is a function of a case (an example in a role) that raises an AssertionError; `suite.py` lists them. There is no
skip list: where a mechanism is exempt, it has declared so in its facts, and then the opposite is checked.
"""
