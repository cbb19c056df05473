"""Checks against bounds that hold from the first step on: no earlier window is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from prime_rl_tools.doctor.checks import (
    DEAD,
    ENOUGH,
    LENGTH,
    MISMATCH_GROWTH,
    REACHABLE,
    mismatch_growth,
)
from prime_rl_tools.doctor.history import REWARD, History, Seen
from prime_rl_tools.doctor.measures import (
    NOISE,
    Verdict,
    by_env,
    centred_by,
    max_of,
    mean_of,
    median_of,
    span,
    teaching_share,
)

MISMATCH_BOUND = 0.1


def mismatch_high(run: History) -> Iterator[Verdict]:
    """Trainer and engines disagree on the sampled tokens, and did so all along."""
    name = "mismatch_kl/all/mean"
    early = median_of(run.values(name, run.early))
    late = median_of(run.values(name, run.late))
    if late <= MISMATCH_BOUND or any(mismatch_growth(run)):
        return
    yield Verdict(
        name="mismatch_high",
        finding="The trainer gives the sampled tokens other probabilities than the engine did.",
        evidence=f"{name}, median {early:.3g} ({span(run.early)}), {late:.3g} ({span(run.late)})",
        threshold=(
            f"above {MISMATCH_BOUND}, without the growth by {MISMATCH_GROWTH:g} that a large "
            "learning rate shows. Upstream prime-rl accepts a new model below 0.015; measured: up "
            "to 0.02"
        ),
        advice=(
            "compare trainer.dtype with the engine's, the chat template and the special tokens; "
            "see that the engine samples by orchestrator.train.sampling alone (no defaults of "
            "generation_config.json); prime_rl_devkit's check_engine compares both token by token"
        ),
    )


COLD = 0.5
HOT = 2.0


def temperature(run: History) -> Iterator[Verdict]:
    """Sampling is so cold that siblings are alike, or so hot that they are worth little."""
    advice = "set orchestrator.train.sampling.temperature to 1.0"
    for env in run.envs:
        used = run.temperature_of(env)
        share, count = teaching_share(run, env)
        if used < COLD and count >= ENOUGH and 1 - share > DEAD:
            yield Verdict(
                name="temperature",
                finding="Sampling is nearly greedy: siblings are alike and have no credit.",
                evidence=(
                    f"temperature {used:g}; {1 - share:.1%} of {count} rollouts have no credit "
                    f"({span(run.late)})"
                ),
                threshold=(
                    f"a temperature below {COLD:g}, and more than {DEAD:.0%} without credit. By "
                    "convention: recipes sample at 0.6 to 1.0; measured: 92 % at 0.02"
                ),
                advice=advice,
                env=env,
            )

        sampled = mean_of(run.values(f"train/{env}/all/reward/mean", run.late))
        held_out = mean_of(np.array(run.held_out.get(env, [])[-2:]))
        if used > 1.0 and held_out > HOT * max(sampled, 0.0) and held_out > 0.0:
            yield Verdict(
                name="temperature",
                finding=(
                    "Sampling is so random that its replies are worth far less than those of the "
                    "evaluation."
                ),
                evidence=(
                    f"temperature {used:g}; the sampled reward is {sampled:.3g} "
                    f"({span(run.late)}), that of the last two evaluations {held_out:.3g}"
                ),
                threshold=(
                    f"a temperature above 1 and {HOT:g} times the sampled reward. By convention; "
                    "measured: 3.5 times at 2.0, and at most 1.1 times at 1.0"
                ),
                advice=advice,
                env=env,
            )


GRADIENT_NORM = 1e3


def gradient_norm(run: History) -> Iterator[Verdict]:
    """Gradients are so large that clipping alone decides the size of a step."""
    name = "optim/grad_norm"
    norm = median_of(run.values(name, run.late))
    if norm > GRADIENT_NORM:
        yield Verdict(
            name="gradient_norm",
            finding=(
                "The gradient is far beyond its clip: every step has the same size, and one "
                "rollout may decide its direction."
            ),
            evidence=f"{name}, median {norm:.3g} ({span(run.late)})",
            threshold=(
                f"above {GRADIENT_NORM:g}. By convention: trainer.optim.max_norm is 1 in most "
                "recipes; measured: at most 3"
            ),
            advice=(
                "look for a reward of another scale (terms of 1e3 and more) or an algorithm that "
                "divides by a spread near zero; lower trainer.optim.lr"
            ),
        )


VERSIONS_BEHIND = 16


def stale_data(run: History) -> Iterator[Verdict]:
    """What trains was sampled by weights of many versions ago."""
    name = "off_policy/mean"
    age = mean_of(run.values(name, run.late))
    if age > VERSIONS_BEHIND:
        yield Verdict(
            name="stale_data",
            finding="The data is many versions old when it trains.",
            evidence=f"{name} {age:.1f} versions ({span(run.late)})",
            threshold=(
                f"above {VERSIONS_BEHIND}. By convention: AReaL (arXiv 2505.24298, section 6.3) "
                "keeps its final reward up to 8; measured: at most 2"
            ),
            advice=(
                "lower orchestrator.max_off_policy_steps; lower orchestrator.max_inflight_rollouts"
            ),
        )


FAILED = 0.2


def failures(run: History) -> Iterator[Verdict]:
    """Many rollouts end in an error and train nothing."""
    for env in run.requested_envs:
        name = f"train/{env}/all/has_error/mean"
        share = mean_of(run.values(name, run.late))
        if share <= FAILED:
            continue
        yield Verdict(
            name="failures",
            finding="Many rollouts fail: what trains is what survived.",
            evidence=f"{name} {share:.1%} ({span(run.late)}){_kinds(run, env)}",
            threshold=(
                f"above {FAILED:.0%}. By convention: the survivors are easier or shorter than what "
                "was asked; measured: 0"
            ),
            advice=(
                "the reason of each is a warning in logs/latest/orchestrator.log of the run; fix "
                "the reward, the judge or the tool that it names, or raise the env's timeout"
            ),
            env=env,
        )


def _kinds(run: History, env: str) -> str:
    """The most frequent errors of the last window, by class."""
    beginning = f"train/{env}/all/error/"
    count_of = Counter[str]()
    for step in run.late:
        for name, count in run.rows[step].items():
            if name.startswith(beginning) and count:
                count_of[name.removeprefix(beginning)] += round(count)
    return "".join(f"; {count} x {kind}" for kind, count in count_of.most_common(3))


WATCHED = ("loss/", "optim/", "entropy/", "mismatch_kl/")


def not_finite(run: History) -> Iterator[Verdict]:
    """A number that was there is null, NaN or infinite now."""
    lost = dict[str, int]()
    for step in run.late:
        for name, value in run.rows[step].items():
            is_watched = name.startswith(WATCHED) or name.endswith("/all/reward/mean")
            if is_watched and (value is None or not np.isfinite(value)):
                lost[name] = lost.get(name, 0) + 1
    if lost:
        names = ", ".join(sorted(lost)[:4])
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        yield Verdict(
            name="not_finite",
            finding="Metrics of the trainer or rewards are not finite.",
            evidence=(
                f"{names}{more}: in up to {max(lost.values())} of {len(run.late)} steps "
                f"({span(run.late)})"
            ),
            threshold=(
                "one step. A step with a gradient that is not finite is skipped (optim/skipped)"
            ),
            advice=(
                "prime-rl report shows the rewards of each step; lower trainer.optim.lr; compute "
                "the loss in float32"
            ),
        )


ENTROPY_RISE = 2.0
ENTROPY_NATS = 0.5
FIRST = 4


def entropy_rise(run: History) -> Iterator[Verdict]:
    """The policy becomes random, and its reward does not gain by it."""
    name = "entropy/all/mean"
    first = run.early[:FIRST]  # it may rise within the first window
    before = mean_of(run.values(name, first))
    after = mean_of(run.values(name, run.late))
    _, rise = run.change(REWARD, run.early, run.late)
    if after > ENTROPY_RISE * before and after - before > ENTROPY_NATS and rise < NOISE:
        yield Verdict(
            name="entropy_rise",
            finding="The policy becomes random, and the reward does not rise.",
            evidence=(
                f"{name} {before:.3g} ({span(first)}), {after:.3g} ({span(run.late)}); the reward "
                f"changed by {rise:+.1f} standard errors"
            ),
            threshold=(
                f"{ENTROPY_RISE:g} times the start and {ENTROPY_NATS} nats more, reward up by less "
                f"than {NOISE:g} standard errors. By convention; measured: it falls in runs that "
                "learn, and doubled in 56 steps where the reward was random"
            ),
            advice=(
                "lower trainer.optim.lr or the weight of an entropy bonus; look for tokens with "
                "negative credit only (siblings that are all wrong)"
            ),
        )


HELD_OUT_FALL = 0.1
EVALUATIONS = 4


def held_out_falls(run: History) -> Iterator[Verdict]:
    """The held-out reward falls, from its best or from where it began."""
    _, rise = run.change(REWARD, run.early, run.late)
    for env, values in run.held_out.items():
        if len(values) < EVALUATIONS:
            continue
        pairs = [(a + b) / 2 for a, b in pairwise(values)]
        best = max(values[0], *pairs)
        last = pairs[-1]
        if best - last <= HELD_OUT_FALL * abs(best):
            continue
        if rise >= NOISE:
            finding = (
                "The held-out reward falls while the sampled one rises: the policy memorizes its "
                "examples, or plays the training reward."
            )
        else:
            finding = "The held-out reward falls: the policy becomes worse at the task."
        yield Verdict(
            name="held_out_falls",
            finding=finding,
            evidence=(
                f"eval/{env}/all/reward/mean: first {values[0]:.3g}, best of two neighbours "
                f"{max(pairs):.3g}, last two {last:.3g}; the sampled reward changed by {rise:+.1f} "
                "standard errors"
            ),
            threshold=(
                f"a fall by {HELD_OUT_FALL:.0%} from the first evaluation or from the best two. By "
                "convention"
            ),
            advice=(
                "read the replies in prime-rl report: what does the reward pay for? More examples; "
                "a lower trainer.optim.lr; a penalty that keeps the policy near its start "
                '(kl_to_initial); keep the best weights with [ckpt] best = "eval/.../reward/mean" '
                "and end with [stop] patience"
            ),
            env=env,
        )


FLAT_STEPS = 48
FLAT = 0.02


def flat_reward(run: History) -> Iterator[Verdict]:
    """Groups have credit, and the reward does not rise. For runs in which no other check finds a
    cause."""
    if len(run.steps) < FLAT_STEPS:
        return
    reward = mean_of(run.values(REWARD, run.late))
    best = mean_of(run.values(max_of(REWARD), run.late))
    change, errors = run.change(REWARD, run.early, run.late)
    teaching = np.mean([teaching_share(run, env)[0] for env in run.envs] or [0.0])
    is_flat = abs(errors) < NOISE or abs(change) < FLAT * best
    if is_flat and reward < REACHABLE * best and teaching > 0.5:
        yield Verdict(
            name="flat_reward",
            finding="Rollouts have credit, and the reward does not rise.",
            evidence=(
                f"{REWARD} {reward - change:.3g} ({span(run.early)}), {reward:.3g} "
                f"({span(run.late)}), {errors:+.1f} standard errors; the best reply of a batch has "
                f"{best:.3g}"
            ),
            threshold=(
                f"less than {NOISE:g} standard errors or {FLAT:.0%} of the best over {FLAT_STEPS} "
                f"steps and more, below {REACHABLE:.0%} of the best. By convention"
            ),
            advice=(
                "read three groups in prime-rl report: does the better sibling have the higher "
                "reward, or does chance decide? Then a larger group_size or batch_size, and "
                "another trainer.optim.lr"
            ),
        )


PAYS = 0.6


def length_pays(run: History) -> Iterator[Verdict]:
    """Replies grow, and the longer sibling wins nearly always, or did until replies met their
    limit."""
    early = by_env(run.first_rollouts)
    late = by_env(run.last_rollouts)
    for env in run.envs:
        name = f"train/{env}/all/num_output_tokens/mean"
        before = mean_of(run.values(name, run.early))
        after = mean_of(run.values(name, run.late))
        if before <= 0 or after < LENGTH * before:
            continue
        windows = ((early, run.early), (late, run.late))
        measured = [(length_correlation(seen.get(env, [])), steps) for seen, steps in windows]
        correlation, steps = max(measured)
        if correlation > PAYS:
            yield Verdict(
                name="length_pays",
                finding=(
                    "The longer sibling nearly always wins, and replies grow: the reward may pay "
                    "for length alone."
                ),
                evidence=(
                    f"correlation of length and reward among siblings {correlation:.2f} "
                    f"({span(steps)}); {name} {before:.4g} ({span(run.early)}), {after:.4g} "
                    f"({span(run.late)})"
                ),
                threshold=(
                    f"a correlation above {PAYS} while replies grow by {LENGTH:g}. By convention; "
                    "measured: 0.8 where each character paid 0.1, at most 0.3 in runs that learn"
                ),
                advice=(
                    "read the longest replies in prime-rl report; "
                    "orchestrator.algo.length_penalty; a reward that does not see the length"
                ),
                env=env,
            )


def length_correlation(seen: Sequence[Seen]) -> float:
    """Pearson's, of the length of a reply and its reward within groups. 0: one of them is the same
    for all siblings."""
    if not seen:
        return 0.0
    groups = [(each.step, each.rollout.group_id) for each in seen]
    lengths = [float(each.rollout.num_trainable_tokens) for each in seen]
    rewards = [float(each.rollout.reward) for each in seen]
    within = centred_by(np.array([lengths, rewards]).T, groups)
    spread = within.std(0)
    if spread.min() < 1e-9:
        return 0.0
    return float((within[:, 0] * within[:, 1]).mean() / (spread[0] * spread[1]))
