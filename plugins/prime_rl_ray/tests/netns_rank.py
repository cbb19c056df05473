"""``python netns_rank.py FOLDER``: a rank of a real process group, which adds up all ranks.

``python netns_rank.py agent ENDPOINT ID FOLDER``: the trainer's agent, of one such rank on each of
two machines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] == "agent":
        from prime_rl.rundir.launch import NODE_ADDRESS
        from prime_rl_app import agent
        from prime_rl_ray.agent import interfaces

        os.environ |= interfaces(os.environ[NODE_ADDRESS])  # as on a node of Ray
        agent.MODULE = "netns_rank"
        endpoint, run_id, folder = sys.argv[2:]
        options = ["--ranks", "2", "--nodes", "2", "--endpoint", endpoint, "--id", run_id]
        sys.exit(agent.main([folder, *options]))

    import torch
    import torch.distributed as dist

    from prime_rl.trainer import parallel
    from prime_rl.trainer.rank import Rank

    rank = Rank.of_process()
    with parallel.joined(rank, torch.device("cpu")):
        total = torch.tensor([rank.number + 1])
        dist.all_reduce(total)
        Path(sys.argv[1], f"rank_{rank.number}").write_text(str(int(total)))
