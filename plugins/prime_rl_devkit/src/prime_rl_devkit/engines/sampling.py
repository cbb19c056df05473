"""Checks of the sampling parameters."""

from __future__ import annotations

from typing import Any

from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.replies import Choice
from prime_rl_devkit.engines.routes import refused
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.verdicts import Broken, NotApplicable


def max_tokens(engine: EngineSubject) -> None:
    """``max_tokens`` ends a completion with 'length', at exactly that number."""
    for wanted in (1, 2, 17):
        choice = engine.choice(prompt_of(engine, 4), max_tokens=wanted, seed=1)
        if len(choice.token_ids) != wanted or choice.finish_reason != "length":
            raise Broken(
                f"max_tokens {wanted} gives {len(choice.token_ids)} tokens and "
                f"{choice.finish_reason!r}, expected {wanted} and 'length'"
            )


def stop_tokens(engine: EngineSubject) -> None:
    """A stop token ends the completion and is its last token, with its logprob: the policy chose
    it, so it trains."""
    prompt = prompt_of(engine, 4)
    free = engine.choice(prompt, max_tokens=24, seed=2)
    stop = free.token_ids[7]
    end = free.token_ids.index(stop) + 1
    unused = next(i for i in range(10, 250) if i not in free.token_ids)
    choice = engine.choice(prompt, max_tokens=24, seed=2, stop_token_ids=[unused, stop])
    _ends_with(choice, free, end=end, stop=stop, what="stop_token_ids")


def end_of_sequence(engine: EngineSubject) -> None:
    """The model's own end-of-sequence tokens end a completion too, unless ``ignore_eos`` is set."""
    ids = engine.reference().eos_token_ids
    if not ids:
        raise NotApplicable("the model folder names no eos_token_id")
    prompt = prompt_of(engine, 4)
    bodies = [engine.body(prompt, max_tokens=48, seed=seed, temperature=1.5) for seed in range(64)]
    for seed, reply in enumerate(engine.replies(bodies)):
        (free,) = reply.choices
        places = [i for i, token in enumerate(free.token_ids) if token in ids]
        if places:
            again = engine.body(prompt, max_tokens=48, seed=seed, temperature=1.5)
            del again["sampling_params"]["ignore_eos"]
            (found,) = engine.replies([again])[0].choices
            token = free.token_ids[places[0]]
            return _ends_with(found, free, end=places[0] + 1, stop=token, what="the model's eos")

    raise NotApplicable(f"none of {sorted(ids)} was sampled in {len(bodies)} replies")


def _ends_with(found: Choice, free: Choice, end: int, stop: int, what: str) -> None:
    if found.token_ids == free.token_ids[: end - 1]:
        raise Broken(
            f"{what}: the stop token {stop} is missing from the tokens. Include it: it was sampled."
        )

    if found.token_ids != free.token_ids[:end] or found.finish_reason != "stop":
        raise Broken(
            f"{what}: {found.token_ids} and {found.finish_reason!r}, expected "
            f"{free.token_ids[:end]} and 'stop', as token {stop} is the first that stops"
        )


def min_tokens(engine: EngineSubject) -> None:
    """No stop token is sampled before ``min_tokens``."""
    prompt = prompt_of(engine, 4)
    fewest = 6
    stops = engine.choice(prompt, max_tokens=4, temperature=0.0).token_ids
    for seed in range(4):
        choice = engine.choice(
            prompt,
            max_tokens=12,
            min_tokens=fewest,
            stop_token_ids=stops,
            seed=seed,
            temperature=0.0 if seed == 0 else 0.5,
        )
        early = [t for t in choice.token_ids[:fewest] if t in stops]
        if len(choice.token_ids) < fewest or early:
            raise Broken(
                f"min_tokens {fewest} with the stop tokens {stops} gives {choice.token_ids}"
            )


def greedy(engine: EngineSubject) -> str:
    """Temperature 0 takes the most likely token, and reports its logprob at temperature 1."""
    prompt = prompt_of(engine, 8)
    choice = engine.choice(prompt, max_tokens=24, temperature=0.0, top_p=0.5)
    rows = engine.reference().logits([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    logprobs = rows.log_softmax(-1)
    best = logprobs.max(-1).values.tolist()
    for i, token in enumerate(choice.token_ids):
        short = best[i] - float(logprobs[i, token])
        if short > 2 * engine.bound:
            raise Broken(f"token {i} is {token}, which is {short:.3g} nats from the most likely")

    gap = max(abs(a - b) for a, b in zip(choice.logprobs, best, strict=True))
    if gap > engine.bound:
        raise Broken(
            f"a greedy logprob differs by {gap:.3g} (at most {engine.bound:g}) from the model's at "
            "temperature 1, nothing cut"
        )

    return f"largest gap {gap:.2g}"


def seeds(engine: EngineSubject) -> None:
    """A seed gives the same tokens alone, beside other requests and in another order; another seed
    gives others."""
    bodies = [
        engine.body(prompt_of(engine, 5, i % 3), max_tokens=8, seed=100 + i) for i in range(16)
    ]
    crowd = [engine.body(prompt_of(engine, 9, i), max_tokens=12, seed=i) for i in range(16)]
    alone = [engine.replies([body])[0].choices[0].token_ids for body in bodies]
    turned = engine.replies([*crowd, *bodies[::-1]])[len(crowd) :][::-1]
    same = sum(a == reply.choices[0].token_ids for a, reply in zip(alone, turned, strict=True))
    if same < (len(bodies) if engine.exact else len(bodies) // 2):
        raise Broken(
            f"{same} of {len(bodies)} seeded requests give the same tokens among others as alone. "
            "Draw each request's numbers from its own seed."
        )

    different = {tuple(tokens) for tokens in alone[::3]}
    if len(different) < 2:
        raise Broken(f"seeds {[100 + i for i in range(0, 16, 3)]} all give {different}")


def choices(engine: EngineSubject) -> None:
    """``n`` choices equal ``n`` requests with the seeds from ``seed`` on."""
    engine.need("choices")
    prompt = prompt_of(engine, 5)
    reply = engine.reply(prompt, max_tokens=6, n=4, seed=40)
    single = [engine.choice(prompt, max_tokens=6, seed=40 + i).token_ids for i in range(4)]
    token_ids = [choice.token_ids for choice in reply.choices]
    same = sum(a == b for a, b in zip(token_ids, single, strict=True))
    if same < (4 if engine.exact else 2):
        raise Broken(f"n=4 with seed 40 gives {token_ids}, seeds 40 to 43 give {single}")


SHAPING: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [11, 12]},
    {"logit_bias": {"11": 100.0}},
)


def nothing_ignored(engine: EngineSubject) -> str:
    """A parameter that changes the distribution is applied or refused. Otherwise the logprobs would
    belong to another distribution than the client expects."""
    obeyed = []
    for shaping in SHAPING:
        (key,) = shaping
        body = engine.body(prompt_of(engine, 4), max_tokens=8, seed=3, **shaping)
        answer = engine.post(body)
        if answer.status_code == 400:
            refused(answer, key, statuses=(400,), word=key)
            continue

        tokens = engine.ok(answer)["choices"][0]["token_ids"]
        if not set(tokens) <= {11, 12}:
            raise Broken(f"{shaping} is answered with {tokens}. Obey it, or answer 400.")
        obeyed.append(key)

    return f"obeys {', '.join(obeyed) or 'none'}; the others are refused"
