"""The author's test kit: small rollouts, real hook calls, conformance checks of algorithms."""

from prime_rl.registry.calls import logged_metrics as logged_metrics
from prime_rl.testing.conformance import CHECKS as CHECKS
from prime_rl.testing.conformance import Outcome as Outcome
from prime_rl.testing.conformance import Report as Report
from prime_rl.testing.conformance import check_algorithm as check_algorithm
from prime_rl.testing.conformance import conformance as conformance
from prime_rl.testing.conformance import prove as prove
from prime_rl.testing.conformance import run as run
from prime_rl.testing.host import CodePoints as CodePoints
from prime_rl.testing.host import FakeHost as FakeHost
from prime_rl.testing.host import FakeReference as FakeReference
from prime_rl.testing.host import default_branch as default_branch
from prime_rl.testing.scoring import conformance_group as conformance_group
from prime_rl.testing.scoring import make_group as make_group
from prime_rl.testing.scoring import make_rollout as make_rollout
from prime_rl.testing.scoring import make_sample as make_sample
from prime_rl.testing.scoring import members_wanted as members_wanted
from prime_rl.testing.scoring import score as score
from prime_rl.testing.scoring import score_batch as score_batch
