"""The estimator lab: what an algorithm's update is on average, exactly.

problem     questions small enough to enumerate every reply, and a tabular policy
updates     the plugin's own scoring, the packer and the trainer's own loss, on every group
estimate    their sums over all groups: expectation and variance
objective   the gradient of what the algorithm declares that it climbs
fit         the expected update against that gradient: cosine, scale, residual, and its causes
prove       all of it, over problems, group sizes and staleness; the verdict in words
show        the same as a table and as a picture
"""
