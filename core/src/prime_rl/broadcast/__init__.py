"""Weights from the trainer's memory into the engines', over a process group (gloo or NCCL).

    trainer       <run>/broadcasts/step_7/MEMORY     version 7 is there for who asks; then STABLE
    orchestrator  <run>/broadcasts/step_7/meeting.json        these engines take it, and meet there
    all           <run>/broadcasts/meetings/ID/here_RANK      trainer rank 0 is 0, engines follow
    trainer  ==>  header, then all tensors by their Hugging Face names  ==>  engines

A member that does not come, or refuses, ends a meeting before any engine has touched its weights.
``meeting`` is for who must not import torch; ``group`` talks.
"""
