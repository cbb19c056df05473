"""Which groups may open, and which complete ones the next batch gets. No I/O, no clock: the
dispatcher and the simulator of ``python -m bench tail`` use the same rule.

    tickets      the groups that were chosen and are not taken in
    durations    how long the groups of an env take
    pace         what the seconds of a step were spent on
    least_step   the shortest steps that the durations allow
    reach        the limit of the lead where engines are busy
    leads        how many batches are requested in advance, by env
    inflight     how many rollouts may be sampled at once, and why
    admission    the rule: what opens, and what is handed on
"""
