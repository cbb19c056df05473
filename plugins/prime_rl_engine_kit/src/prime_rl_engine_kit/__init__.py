"""What every server of the engine contract (``docs/engines.md``) is made of, whatever computes
behind it: its command line and end, its keys, its requests and errors.

For engine plugins written in Python. Needs no more than the contract itself.
"""
