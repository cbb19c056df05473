"""Checks of log-probabilities: their distribution, and their gap to those of transformers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from prime_rl_devkit.engines.prompts import lively, prompt_of
from prime_rl_devkit.engines.reference import largest_gap
from prime_rl_devkit.engines.replies import Choice
from prime_rl_devkit.engines.statistics import FAR, deviation
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.verdicts import Broken, NotApplicable

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.7, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
DRAWS = 1024
PER_REQUEST = 128


def sampled_distribution(engine: EngineSubject) -> str:
    """The frequency of tokens matches their logprobs at any temperature and truncation: the
    reported distribution is the sampled one (chi-square test of one position)."""
    prompt = lively(engine)
    tested: list[float] = []
    for index, setting in enumerate(SETTINGS):
        drawn = _draws(engine, prompt, setting, first_seed=10_000 * index)
        logprobs = _one_logprob_each(drawn, engine.bound, setting)
        total = sum(map(math.exp, logprobs.values()))
        if total > 1.0 + len(logprobs) * engine.bound:
            raise Broken(f"at {setting} the probabilities of sampled tokens add up to {total:.4f}")
        far = deviation(Counter(token for token, _ in drawn), logprobs)
        if far is not None and far > FAR:
            raise Broken(
                f"at {setting} {DRAWS} samples of {len(logprobs)} tokens are {far:.1f} standard "
                f"deviations from the reported probabilities, which add up to {total:.3f} (chance "
                f"stays below {FAR:g}). Report logprobs after temperature and truncation."
            )

        tested += [] if far is None else [far]
        _as_asked(engine, prompt, logprobs=logprobs, setting=setting)

    if not tested:
        raise NotApplicable("one token has nearly all probability at every setting")
    return f"{len(tested)} settings, {DRAWS} samples each: at most {max(tested):.1f} deviations off"


def _draws(
    engine: EngineSubject, prompt: list[int], setting: dict[str, Any], first_seed: int
) -> list[tuple[int, float]]:
    """(token, logprob) of the first position."""
    many = 1 if "choices" in engine.lacks else PER_REQUEST
    bodies = [
        engine.body(prompt, max_tokens=1, seed=first_seed + i, n=many, **setting)
        for i in range(0, DRAWS, many)
    ]
    return [
        (choice.token_ids[0], choice.logprobs[0])
        for reply in engine.replies(bodies)
        for choice in reply.choices
    ]


def _one_logprob_each(
    drawn: list[tuple[int, float]], bound: float, setting: dict[str, Any]
) -> dict[int, float]:
    logprobs: dict[int, float] = {}
    for token, logprob in drawn:
        first = logprobs.setdefault(token, logprob)
        if abs(first - logprob) > 2 * bound:
            raise Broken(f"at {setting} token {token} is given logprob {first} and then {logprob}")
    return logprobs


def _as_asked(
    engine: EngineSubject, prompt: list[int], logprobs: dict[int, float], setting: dict[str, Any]
) -> None:
    """Check that the distribution is the requested one."""
    row = engine.reference().logits(prompt)[-1:]
    rows = row.expand(len(logprobs), -1)
    gap = largest_gap(rows, [*logprobs], [*logprobs.values()], **setting)
    if not gap <= engine.bound:
        difference = "a token that is cut" if math.isinf(gap) else f"a gap of {gap:.3g}"
        raise Broken(
            f"at {setting}: {difference}, against transformers in float32 (at most "
            f"{engine.bound:g}). The order is temperature, top_k, min_p, and top_p over what they "
            "leave."
        )


def generated_logprobs(engine: EngineSubject) -> str:
    """Logprobs of whole completions equal those of transformers for the same tokens."""
    cases: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(engine, 3), {"temperature": 1.0}),
        (prompt_of(engine, 40), {"temperature": 0.7, "top_p": 0.9}),
        (prompt_of(engine, 17), {"temperature": 1.3, "top_k": 30}),
    ]
    bodies = [engine.body(p, max_tokens=48, seed=i, **s) for i, (p, s) in enumerate(cases)]
    gaps = []
    for (prompt, setting), reply in zip(cases, engine.replies(bodies), strict=True):
        (found,) = reply.choices
        gaps.append(engine.reference().gap(prompt, found.token_ids, found.logprobs, **setting))
        _within(engine, gaps[-1], f"a completion at {setting}")

    return f"largest gap {max(gaps):.2g} (at most {engine.bound:g})"


def _within(engine: EngineSubject, gap: float, what: str) -> None:
    if not gap <= engine.bound:
        raise Broken(
            f"{what}: a logprob differs by {gap:.3g} from transformers' in float32, at most "
            f"{engine.bound:g} is allowed at {engine.dtype}"
        )


def alternatives(engine: EngineSubject) -> None:
    """``logprobs: k`` returns the k most likely tokens of each position, of the same
    distribution."""
    engine.need("alternatives")
    prompt = prompt_of(engine, 6)
    wanted = 5
    choice = engine.choice(prompt, max_tokens=6, seed=5, logprobs=wanted, temperature=0.8)
    rows = engine.reference().logits([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    for place, top in enumerate(choice.top):
        likely = {t: v for t, v in top.items() if t != choice.token_ids[place]}
        if len(top) < wanted or len(likely) > wanted:
            raise Broken(f"top_logprobs of token {place} are {top}, expected {wanted}")
        same = rows[place : place + 1].expand(len(top), -1)
        gap = largest_gap(same, [*top], [*top.values()], temperature=0.8)
        _within(engine, gap, f"top_logprobs of token {place}")
        best = sorted((same[0] / 0.8).log_softmax(-1).tolist(), reverse=True)[wanted - 1]
        if sum(value > best - 2 * engine.bound for value in top.values()) < wanted:
            raise Broken(f"top_logprobs of token {place} leave out a more likely token: {top}")


def prompt_logprobs(engine: EngineSubject) -> str:
    """``prompt_logprobs`` equal those of transformers at temperature 1, at any sampling
    temperature: of the prompt's own tokens, of the k most likely ones, and of the whole
    vocabulary."""
    engine.need("prompt_logprobs")
    gaps = []
    vocabulary = engine.reference().logits(prompt_of(engine, 2)).shape[-1]
    sizes = ((2, 0), (7, 1), (5, 3), (4, vocabulary), (min(200, engine.max_model_len - 1), 0))
    for length, asked in sizes:
        prompt = prompt_of(engine, length)
        reply = engine.reply(
            prompt, max_tokens=1, prompt_logprobs=asked, temperature=0.5, top_p=0.5, seed=0
        )
        if reply.prompt_logprobs is None:
            raise Broken(f"prompt_logprobs {asked} is answered with null")
        of_prompt = [
            row[token] for row, token in zip(reply.prompt_logprobs, prompt[1:], strict=True)
        ]
        rows = engine.reference().logits(prompt)[:-1]
        gaps.append(largest_gap(rows, prompt[1:], of_prompt))
        _within(engine, gaps[-1], f"prompt_logprobs of {length} tokens")
        gaps += _most_likely(engine, rows, found=reply.prompt_logprobs, wanted=asked)

    return f"largest gap {max(gaps):.2g} (at most {engine.bound:g})"


def _most_likely(
    engine: EngineSubject, rows: Any, found: list[dict[int, float]], wanted: int
) -> list[float]:
    """Gaps of the alternatives at each place: the ``wanted`` most likely tokens, and no other but
    the prompt's own, which comes first."""
    gaps = []
    for place, (row, scores) in enumerate(zip(rows, found, strict=True), start=1):
        ordered = [*scores.values()]
        best = sorted(row.log_softmax(-1).tolist(), reverse=True)[: max(wanted, 1)]
        likely = [value for value in ordered if value > best[-1] - 2 * engine.bound]
        if not wanted <= len(scores) <= wanted + 1 or len(likely) < wanted:
            raise Broken(
                f"prompt_logprobs {wanted}: place {place} has {len(scores)} tokens, {len(likely)} "
                f"of them among the {wanted} most likely"
            )

        gaps.append(largest_gap(row.expand(len(scores), -1), [*scores], ordered))
        _within(engine, gaps[-1], f"prompt_logprobs {wanted} at place {place}")

    return gaps


def same_choice(engine: EngineSubject, one: Choice, other: Choice) -> tuple[bool, float]:
    """Whether two answers to one request have the same tokens, and the largest gap of their
    logprobs over the common tokens."""
    gap = 0.0
    pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
    for token, token_, logprob, logprob_ in pairs:
        if token != token_:
            return False, gap
        gap = max(gap, abs(logprob - logprob_))
    return len(one.token_ids) == len(other.token_ids), gap
