"""The page: attention maps on demand, an HTTP server over them, and the page itself.

Read maps.py first (any part of any map, without ever holding all of it), then subjects.py (what can be shown) and
server.py. The page is plain ES modules under static/, one file a view. Nothing of Regard but the command line and
`regard.show` imports this package.
"""
