"""Conformance checks of engines: a suite for any server behind the HTTP
contract of ``docs/engines.md``.

As tests of an engine plugin, one test a check:

    from prime_rl_devkit.engines import CHECKS, hold, started

    @pytest.fixture(scope="session")
    def engine(tmp_path_factory):
        with started(MyEngine(MyConfig()), tmp_path_factory.mktemp("engine")) as subject:
            yield subject

    @pytest.mark.parametrize("check", CHECKS)
    def test_the_engine_keeps_its_promises(engine, check):
        hold(engine, check)

Against a server that runs already (the key and the folder of the weights it serves are needed):

    subject = EngineSubject(
        "http://127.0.0.1:8000", model_folder=Path("model"), work_folder=tmp_path, admin_key="..."
    )
    print(check_engine(subject))

``started`` and ``EngineSubject`` also take ``dtype="bfloat16"``, ``tolerance=1e-3`` (the largest
gap in a log-probability; None: by dtype) and ``lacks={"sleep": "why"}`` for missing optional
features (``OPTIONAL``). An engine class may declare the same in an attribute ``lacks``. From the
command line: ``prime-rl plugins check NAME`` and ``pytest --prime-rl NAME``.

The checks need transformers and torch for reference numbers, and import them on first use. The
engine may run in another virtual environment.
"""

from prime_rl_devkit.engines.models import write_tiny_model as write_tiny_model
from prime_rl_devkit.engines.starting import started as started
from prime_rl_devkit.engines.subject import OPTIONAL as OPTIONAL
from prime_rl_devkit.engines.subject import TOLERANCE as TOLERANCE
from prime_rl_devkit.engines.subject import EngineSubject as EngineSubject
from prime_rl_devkit.engines.suite import CHECKS as CHECKS
from prime_rl_devkit.engines.suite import check_engine as check_engine
from prime_rl_devkit.engines.suite import conformance as conformance
from prime_rl_devkit.engines.suite import hold as hold
from prime_rl_devkit.engines.suite import run_check as run_check
