"""Checks of sleep and of the end of the process."""

from __future__ import annotations

import subprocess
import time

from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.routes import refused
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.engines.weights import REFUSED, other_weights, serves, settled
from prime_rl_devkit.verdicts import Broken, NotApplicable


def sleep(engine: EngineSubject) -> None:
    """A sleeping engine keeps its requests. After waking it continues them, but not before
    ``/resume``."""
    engine.need("sleep")
    engine.need_admin()
    long = engine.max_model_len - 16
    prompt = prompt_of(engine, 5)
    free = engine.choice(prompt, max_tokens=long, seed=4)
    with engine.running(engine.body(prompt, max_tokens=long, seed=4)) as running:
        engine.pause()
        engine.ok(engine.admin("/sleep"))
        engine.ok(engine.http.get("/health"))
        before = settled(engine)
        engine.ok(engine.admin("/wake_up"))
        time.sleep(0.1)
        made = engine.metric("generation_tokens") - before
        ended = running.done()
        engine.resume()
        choice = running.result().choices[0]

    if made or ended:
        raise Broken(
            f"between /sleep and /resume {made:.0f} tokens were sampled"
            + " and a request ended" * ended
        )

    if engine.exact and choice.token_ids != free.token_ids:
        raise Broken("a request that slept has other tokens than one that did not")


def sleeping_update(engine: EngineSubject) -> str:
    """Weights that arrive while the engine sleeps are served once it is awake, or are refused at
    once; never in part."""
    engine.need("sleep")
    engine.need_admin()
    with other_weights(engine, seed=5) as folder:
        engine.pause()
        engine.ok(engine.admin("/sleep"))
        answer = engine.load(folder)
        engine.ok(engine.admin("/wake_up"))
        engine.resume()
        if answer.is_success:
            serves(engine, folder, what="after an update of a sleeping engine", number=1)
            return "taken while asleep"

        refused(answer, "an update of a sleeping engine", statuses=(*REFUSED, 503), word="")
        serves(
            engine,
            engine.model_folder,
            what="after a refused update of a sleeping engine",
            number=1,
        )
        return "refused while asleep"


def ends_on_sigterm(engine: EngineSubject) -> None:
    """SIGTERM ends the process with code 0. (The last check, because no engine is left after
    it.)"""
    process = engine.process
    if process is None:
        raise NotApplicable("the kit did not start this engine")
    process.terminate()
    try:
        code = process.wait(30)
    except subprocess.TimeoutExpired as error:
        raise Broken("30 seconds after SIGTERM it still runs") from error

    if code != 0:
        raise Broken(f"after SIGTERM it ends with code {code}, expected 0")
