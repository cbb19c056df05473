"""A real Ray cluster for tests: nodes that are local processes on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace

import psutil
import pytest
from waiting import LIMIT

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
node["num_cpus"] = int(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print("address", cluster.address, flush=True)

def raylet(each):
    return each.all_processes["raylet"][0].process.pid

print("head", raylet(cluster.head_node), flush=True)
for line in sys.stdin:
    if line == "add\\n":
        cluster.add_node(**node)
    else:
        (lost,) = [each for each in cluster.list_all_nodes() if raylet(each) == int(line)]
        cluster.remove_node(lost, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


def with_default_signals() -> None:
    """Restore Ctrl-C: a shell that starts the tests in the background makes them ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ray_cluster(cpus: int) -> Iterator[SimpleNamespace]:
    """Two nodes with so many cores each. ``tell("add")`` adds one; ``tell(PID)`` removes the one
    with this raylet."""
    pytest.importorskip("ray", reason="ray is not installed")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    # A worker for each core would import everything, and wait for work of a kind that never comes.
    settings |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLUSTER, str(cpus)],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    facts = dict(line.split() for line in islice(process.stdout, 2))

    def tell(what):
        print(what, file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"

    yield SimpleNamespace(address=facts["address"], head=int(facts["head"]), tell=tell)
    process.communicate(timeout=LIMIT)


def processes_with(text: str) -> list[int]:
    """Processes whose command line contains ``text``."""
    others = (each for each in psutil.process_iter(["cmdline"]) if each.pid != os.getpid())
    return [each.pid for each in others if text in " ".join(each.info["cmdline"] or ())]
