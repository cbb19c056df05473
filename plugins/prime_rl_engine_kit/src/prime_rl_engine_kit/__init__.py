"""Code for servers of the engine contract (``docs/engines.md``) in Python: command line, clean end,
keys, requests and errors. It does not depend on an inference library.
"""
