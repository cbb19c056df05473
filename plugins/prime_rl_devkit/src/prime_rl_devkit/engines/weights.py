"""Checks of weight updates: complete or refused, without interrupting requests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl_devkit.engines import checkpoints
from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.reference import largest_gap
from prime_rl_devkit.engines.replies import Choice
from prime_rl_devkit.engines.routes import refused
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.verdicts import Broken

REFUSED = (400, 404, 409, 422, 500)


@contextmanager
def other_weights(engine: EngineSubject, seed: int = 1) -> Iterator[Path]:
    """A checkpoint in which every tensor differs from the served one."""
    folder = engine.new_folder(f"changed-{seed}")
    checkpoints.changed(engine.model_folder, folder, seed)
    yield folder
    shutil.rmtree(folder)


def gap_to(engine: EngineSubject, folder: Path, number: int = 0) -> float:
    """The largest gap of the engine's logprobs to those of a folder's weights, on two prompts."""
    reference = engine.reference(folder)
    gaps = []
    for length in (5, 24):
        prompt = prompt_of(engine, length, number)
        choice = engine.choice(prompt, f"{engine.version}/{number}", max_tokens=24, seed=number)
        gaps.append(reference.gap(prompt, choice.token_ids, choice.logprobs))

    return max(gaps)


def serves(engine: EngineSubject, folder: Path, what: str, number: int = 0) -> float:
    """The engine samples from exactly these weights. Raises ``Broken``."""
    gap = gap_to(engine, folder, number)
    if not gap <= engine.bound:
        raise Broken(
            f"{what}: logprobs differ by {gap:.3g} from those of {folder.name} in transformers, at "
            f"most {engine.bound:g} is allowed"
        )
    return gap


def weight_update(engine: EngineSubject) -> str:
    """After an update every tensor is the new one, including the tied head, and the version is the
    new one. After an update back, every tensor is the old one."""
    engine.need_admin()
    with other_weights(engine) as folder:
        started = time.perf_counter()
        engine.update(folder)
        seconds = time.perf_counter() - started
        _version_is(engine, "an update")
        gap = serves(engine, folder, "after an update")
        again = engine.choice(prompt_of(engine, 5), max_tokens=4, seed=0)
        if again.versions != [(str(engine.version), 0, 4)]:
            raise Broken(f"after update {engine.version} the versions are {again.versions}")

    engine.update(engine.model_folder)
    serves(engine, engine.model_folder, what="after an update back", number=1)
    return f"largest gap {gap:.2g}; an update took {1000 * seconds:.0f} ms"


def _version_is(engine: EngineSubject, what: str) -> None:
    expected = engine.version
    engine.meet()
    if engine.version != expected:
        raise Broken(f"after {what} to {expected} /health says version {engine.version}")


def damaged_weights(engine: EngineSubject) -> None:
    """A checkpoint that is damaged, incomplete or does not fit is refused with the reason, and the
    engine continues to serve the old weights."""
    engine.need_admin()
    for number, (what, damage) in enumerate(checkpoints.DAMAGES.items()):
        with other_weights(engine, seed=3) as sound:
            folder = engine.new_folder("damaged")
            damage(sound, folder)
            engine.pause()
            answer = engine.load(folder)
            engine.resume()
            refused(answer, what, statuses=REFUSED, word="")
            _version_is(engine, f"an update with {what} was refused; the version belongs")
            serves(
                engine,
                engine.model_folder,
                what=f"after an update with {what} was refused",
                number=number,
            )
            shutil.rmtree(folder, ignore_errors=True)


def pause(engine: EngineSubject) -> None:
    """After ``/pause`` no token is sampled, and old and new requests wait until ``/resume``."""
    engine.need_admin()
    long = engine.max_model_len - 16
    prompt = prompt_of(engine, 4)
    started = time.monotonic()
    unpaused = engine.choice(prompt, max_tokens=long, seed=4)
    seconds = time.monotonic() - started

    with engine.running(engine.body(prompt, max_tokens=long, seed=4)) as old:
        engine.pause()
        before = settled(engine)
        if old.done():
            raise Broken(f"a request of {long} tokens ended under /pause, or before it could come")

        with engine.held(engine.body(prompt, max_tokens=3, seed=5)) as new:
            time.sleep(max(0.1, seconds))  # an engine that samples would be through
            sampled = engine.metric("generation_tokens") - before
            ended = [request for request in (old, new) if request.done()]
            engine.resume()
            if sampled or ended:
                raise Broken(
                    f"while paused {sampled:.0f} tokens were sampled and {len(ended)} requests "
                    "ended"
                )
            new.result()

        paused = old.result().choices[0]

    if engine.exact and paused.token_ids != unpaused.token_ids:
        at = _parting(paused, unpaused)
        raise Broken(f"a request that was paused has other tokens, from number {at} on")


def settled(engine: EngineSubject) -> float:
    """``generation_tokens``; some engines count a step a moment after it."""
    before = -1.0
    now = engine.metric("generation_tokens")
    while now != before:
        before = now
        time.sleep(0.1)
        now = engine.metric("generation_tokens")
    return now


def _parting(one: Choice, other: Choice) -> int:
    """The first place at which they differ."""
    shorter = min(len(one.token_ids), len(other.token_ids))
    for place in range(shorter):
        if one.token_ids[place] != other.token_ids[place]:
            return place
    return shorter


def in_flight(engine: EngineSubject) -> str:
    """A request that is running during an update keeps its place and its KV, continues with the new
    weights, and tells which version sampled which token."""
    engine.need_admin()
    old = engine.version
    length = engine.max_model_len - 16
    prompt = prompt_of(engine, 6)
    with other_weights(engine) as folder:
        with engine.running(engine.body(prompt, str(old), max_tokens=length, seed=6)) as running:
            engine.update(folder)
            choice = running.result().choices[0]
        _both_versions(choice, old, new=engine.version, length=length)
        swap = choice.versions[0][2]
        gaps = _gaps_across(engine, folder, prompt=prompt, choice=choice, swap=swap)

    if gaps["before"] > engine.bound or gaps["kept"] > engine.bound:
        said = ""
        if gaps["before"] <= engine.bound and gaps["recomputed"] <= engine.bound:
            said = " The KV was computed again: pause with mode=keep and clear_cache=false."
        raise Broken(
            f"logprobs differ by {gaps['before']:.3g} before the update and {gaps['kept']:.3g} "
            f"after it from old weights, then new weights over the old KV (at most "
            f"{engine.bound:g}).{said}"
        )

    gap = max(gaps["before"], gaps["kept"])
    return f"updated after {swap} of {length} tokens; largest gap {gap:.2g}"


def _both_versions(choice: Choice, old: int, new: int, length: int) -> None:
    versions = [version for version, _, _ in choice.versions]
    if len(choice.token_ids) != length or versions != [str(old), str(new)]:
        raise Broken(
            f"a request of {length} tokens that lived through the update from {old} to {new} has "
            f"{len(choice.token_ids)} tokens, of versions {choice.versions}"
        )


def _gaps_across(
    engine: EngineSubject, folder: Path, prompt: list[int], choice: Choice, swap: int
) -> dict[str, float]:
    """Before the swap; after it if the KV was kept; after it if it was computed again."""
    tokens = choice.token_ids
    logprobs = choice.logprobs
    every = [*prompt, *tokens]
    first = engine.reference()
    new = engine.reference(folder)
    kept = len(prompt) + swap - 1  # the last token before the swap is fed to the new weights
    after = new.logits_after(first, every, kept)[:-1]
    anew = new.logits(every)[kept:-1]
    return {
        "before": first.gap(prompt, tokens[:swap], logprobs[:swap]),
        "kept": largest_gap(after, tokens[swap:], logprobs[swap:]),
        "recomputed": largest_gap(anew, tokens[swap:], logprobs[swap:]),
    }


def cache_salt(engine: EngineSubject) -> str:
    """KV of old weights is never used under a new salt, even while its request is running. A
    repeated prompt gets the same answer."""
    engine.need_admin()
    prompt = prompt_of(engine, 70)
    cold, warm = (engine.choice(prompt, "a", max_tokens=4, seed=7) for _ in range(2))
    gap = max(abs(a - b) for a, b in zip(cold.logprobs, warm.logprobs, strict=True))
    if gap > engine.bound or (engine.exact and cold.token_ids != warm.token_ids):
        raise Broken(
            f"a prompt asked twice under one salt: {cold.token_ids} and {warm.token_ids}, "
            f"logprobs {gap:.3g} apart"
        )

    # The old request still runs when the new one asks for the same prompt under another salt.
    long = engine.body(prompt, "a", max_tokens=engine.max_model_len - 80, seed=8)
    with other_weights(engine) as folder:
        with engine.running(long) as running:
            engine.update(folder)
            reply = engine.reply(prompt, "b", max_tokens=4, seed=9)
            running.result()
        (choice,) = reply.choices
        gap = engine.reference(folder).gap(prompt, choice.token_ids, choice.logprobs)

    if gap > engine.bound:
        raise Broken(
            f"after an update, under another salt, logprobs differ by {gap:.3g} from the new "
            f"weights' (at most {engine.bound:g}; {reply.cached_tokens} tokens came from a cache): "
            "old KV was used"
        )

    return f"largest gap {gap:.2g}; {reply.cached_tokens or 0} tokens from a cache"


def adapter(engine: EngineSubject) -> str:
    """A folder with a LoRA adapter serves base and adapter together, with the same result when
    loaded twice. An adapter that does not fit is refused. A whole model replaces both."""
    engine.need("adapters")
    engine.need_admin()
    base = engine.model_folder
    folder = engine.new_folder("adapter")
    checkpoints.write_adapter(base, folder)
    whole = checkpoints.merged(base, folder, engine.new_folder("merged"))
    for number in range(2):
        engine.update(folder)
        gap = serves(
            engine, whole, what=f"with an adapter, update {number + 1} of 2", number=number
        )

    wrong = checkpoints.write_adapter(base, engine.new_folder("wrong"), rank=checkpoints.RANK + 1)
    answer = engine.load(wrong)
    refused(answer, "an adapter of another rank than its config says", statuses=REFUSED, word="")
    serves(engine, whole, what="after a wrong adapter was refused", number=2)
    engine.update(base)
    serves(engine, base, what="after a whole model again", number=3)
    return f"largest gap {gap:.2g}"
