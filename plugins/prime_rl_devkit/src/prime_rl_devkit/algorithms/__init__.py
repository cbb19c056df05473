"""Conformance checks of algorithms: what ``prime_rl.testing.check_algorithm`` runs.

streams    long enough, finite, on the mask, of the component it declared
           for groups of one, tied, failed, with huge and tiny rewards, with a reward of nan
behavior   same input same credit, whatever the order and whatever runs at the same time
gradient   a step on the credit moves the policy the way the credit points
"""
