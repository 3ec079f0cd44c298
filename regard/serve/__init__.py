"""The API server: runs behind HTTP, with continuous batching over decoding states.

Read generating.py first (requests of any length join and leave a running batch), then app.py (the routes). gathering.py
runs what needs no state (translations, classes, gaps, vectors) in batches of what has come meanwhile.
"""
