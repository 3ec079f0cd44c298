"""The page: attention maps on demand, an HTTP server over them, and the page itself.

Read maps.py first (any part of any map, without ever holding all of it), then subjects.py and images.py (what can be
shown), engine.py (the questions) and server.py. The page is plain ES modules in static/, one file per view. Only the
command line and `regard.show` import this package.
"""
