"""The checks, one function each, and their thresholds.

"Measured" means: on 105 segments (20 to 120 steps) of five undisturbed runs of
``configs/reverse_text/grpo.toml``, seeds 0 to 4; ``python -m bench.doctor`` prints the figures. The
thresholds were chosen with seeds 0 and 1, and the other seeds raised no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prime_rl_tools.doctor.history import REWARD, History
from prime_rl_tools.doctor.measures import (
    NOISE,
    STALE,
    Verdict,
    by_env,
    centred_by,
    increase,
    max_of,
    mean_length,
    mean_of,
    median_of,
    most_common_reply,
    span,
    teaching_share,
)

ENTROPY_LEFT = 0.2
REACHABLE = 0.9


def entropy_collapse(run: History) -> Iterator[Verdict]:
    """The policy is certain, and its rewards are not at the top."""
    name = "entropy/all/mean"
    before = mean_of(run.values(name, run.early))
    after = mean_of(run.values(name, run.late))
    reward = mean_of(run.values(REWARD, run.late))
    best = mean_of(run.values(max_of(REWARD), run.late))
    middle = run.steps[len(run.steps) // 2 :][: len(run.late)]
    _, rise = run.change(REWARD, middle, run.late)
    if after < ENTROPY_LEFT * before and reward < REACHABLE * best and rise < NOISE:
        yield Verdict(
            name="entropy_collapse",
            finding=(
                "The policy has become nearly deterministic while better replies are known: it no "
                "longer explores."
            ),
            evidence=(
                f"{name} {before:.3g} ({span(run.early)}), {after:.3g} ({span(run.late)}); reward "
                f"{reward:.3g}, best reply of a batch {best:.3g}, no rise over the last half"
            ),
            threshold=(
                f"entropy below {ENTROPY_LEFT:.0%} of the start and reward below {REACHABLE:.0%} "
                "of the best reply, not rising. Entropy that is spent buys no more reward (Cui et "
                "al. 2025, arXiv 2505.22617, section 2.4); the share is measured"
            ),
            advice=(
                "lower trainer.optim.lr; a penalty (algorithm entropy_bonus) or a loss that holds "
                "covariant tokens (action_loss clip_cov or kl_cov); raise "
                "orchestrator.train.sampling.temperature"
            ),
        )


MISMATCH = 0.05
MISMATCH_GROWTH = 3.0


def mismatch_growth(run: History) -> Iterator[Verdict]:
    """Trainer and engines disagree more and more on the sampled tokens."""
    name = "mismatch_kl/all/mean"
    usual = [step for step in run.at_peak if step not in run.late] or run.early
    before = median_of(run.values(name, usual))
    after = median_of(run.values(name, run.late))
    if after > MISMATCH and after > MISMATCH_GROWTH * before:
        lag = mean_of(run.values("off_policy/mean", run.late))
        yield Verdict(
            name="mismatch_growth",
            finding="The trainer's log-probabilities move away from those at sampling.",
            evidence=(
                f"{name}, median {before:.3g} before, {after:.3g} ({span(run.late)}); the data is "
                f"{lag:.1f} versions old"
            ),
            threshold=(
                f"above {MISMATCH} and {MISMATCH_GROWTH:g} times the steps before. Upstream "
                "prime-rl accepts a new model below 0.015; measured: up to 0.02 over a window at a "
                "learning rate of 7e-4"
            ),
            advice=(
                "lower orchestrator.max_off_policy_steps or trainer.optim.lr. If it stays with "
                "max_off_policy_steps = 0, engine and trainer compute differently: compare "
                "trainer.dtype with the engine's, and the chat template"
            ),
        )


LENGTH = 1.5


def length_drift(run: History) -> Iterator[Verdict]:
    """Replies grow or shrink, and the reward does not gain by it."""
    for env in run.envs:
        name = f"train/{env}/all/num_output_tokens/mean"
        reward = f"train/{env}/all/reward/mean"
        before = mean_of(run.values(name, run.early))
        after = mean_of(run.values(name, run.late))
        _, rise = run.change(reward, run.early, run.late)
        if before > 0 and not 1 / LENGTH < after / before < LENGTH and rise < NOISE:
            yield Verdict(
                name="length_drift",
                finding=(
                    f"Replies get {'longer' if after > before else 'shorter'}, and the reward does "
                    "not rise."
                ),
                evidence=(
                    f"{name} {before:.4g} ({span(run.early)}), {after:.4g} ({span(run.late)}); the "
                    f"reward changed by {rise:+.1f} standard errors"
                ),
                threshold=(
                    f"a factor of {LENGTH:g} in either direction, reward up by less than {NOISE:g} "
                    "standard errors; measured: at most 1.11"
                ),
                advice=(
                    'a loss without length bias (trainer.loss.normalize_by = "constant", as Dr. '
                    "GRPO, arXiv 2503.20783); orchestrator.algo.length_penalty; or "
                    "orchestrator.train.sampling.max_completion_tokens"
                ),
                env=env,
            )


DOMINANT = 0.95
VARIES = 0.02


def dominant_term(run: History) -> Iterator[Verdict]:
    """One of several reward terms decides which sibling wins; the others are not learned."""
    for env, seen in by_env(run.last_rollouts).items():
        names = sorted({term for each in seen for term in each.rollout.rewards})
        if len(names) < 2:
            continue
        table = np.array([[s.rollout.rewards.get(n, 0.0) for n in names] for s in seen])
        rewards = np.array([each.rollout.reward for each in seen])
        groups = [(each.step, each.rollout.group_id) for each in seen]
        within = centred_by(table, groups)
        won = centred_by(rewards[:, None], groups)[:, 0]
        spread = within.std(0)
        if won.std() < 1e-9 or (spread > VARIES).sum() < 2:
            continue
        weights = np.linalg.lstsq(within, won, rcond=None)[0]
        shares = weights * (within * won[:, None]).mean(0) / (won**2).mean()
        top = int(shares.argmax())
        if shares[top] > DOMINANT:
            others = ", ".join(f"{n} {s:.1%}" for n, s in zip(names, shares, strict=True))
            yield Verdict(
                name="dominant_term",
                finding=f"The reward term {names[top]!r} alone decides which sibling is better.",
                evidence=(
                    f"shares of the reward's variance among siblings: {others} ({span(run.late)})"
                ),
                threshold=(
                    f"more than {DOMINANT:.0%}, while another term differs among siblings too "
                    f"(standard deviation above {VARIES}). By convention: less than 5 % of a "
                    "gradient is left for the others"
                ),
                advice=(
                    "the terms' weights in the taskset (rewards are summed weight times term), or "
                    "an env of its own for each term"
                ),
                env=env,
            )


SILENT = 0.1
ENOUGH = 32


def silent_env(run: History) -> Iterator[Verdict]:
    """Hardly any rollout of an env has credit."""
    for env in run.envs:
        share, count = teaching_share(run, env)
        if count >= ENOUGH and share < SILENT:
            reward = mean_of(run.values(f"train/{env}/all/reward/mean", run.late))
            kind = "too hard" if reward < 0.5 else "solved"
            yield Verdict(
                name="silent_env",
                finding=(
                    f"The env teaches nothing: siblings have equal rewards, as if it were {kind}."
                ),
                evidence=(
                    f"{share:.1%} of {count} rollouts have credit ({span(run.late)}); mean reward "
                    f"{reward:.3g}"
                ),
                threshold=f"below {SILENT:.0%}; measured: never below 64 %",
                advice=(
                    "its ratio in [[orchestrator.train.env]], its args (easier or harder "
                    'examples), its group_size, or orchestrator.sampler.type = "difficulty_pools"'
                ),
                env=env,
            )


TRUNCATED = 0.2


def truncation(run: History) -> Iterator[Verdict]:
    """Replies end at a limit, not by the policy's own choice."""
    for env in run.envs:
        name = f"train/{env}/all/is_truncated/mean"
        share = mean_of(run.values(name, run.late))
        if share > TRUNCATED:
            length = mean_of(run.values(f"train/{env}/all/num_output_tokens/max", run.late))
            yield Verdict(
                name="truncation",
                finding="Many replies are cut off at the token limit, and are scored unfinished.",
                evidence=(
                    f"{name} {share:.1%} ({span(run.late)}); longest reply {length:.0f} tokens"
                ),
                threshold=(
                    f"above {TRUNCATED:.0%}. By convention; upstream's opsd degrades at 99 %; "
                    "measured: 0"
                ),
                advice=(
                    "raise orchestrator.train.sampling.max_completion_tokens, seq_len or "
                    "inference.max_model_len; or add orchestrator.algo.length_penalty"
                ),
                env=env,
            )


DEAD = 0.5


def dead_groups(run: History) -> Iterator[Verdict]:
    """Most groups have equal rewards and are sampled for nothing."""
    silent = {verdict.env for verdict in silent_env(run)}
    for env in run.envs:
        share, count = teaching_share(run, env)
        if env not in silent and count >= ENOUGH and 1 - share > DEAD:
            yield Verdict(
                name="dead_groups",
                finding="Most groups have no credit: their samples cost time and teach nothing.",
                evidence=f"{1 - share:.1%} of {count} rollouts have no credit ({span(run.late)})",
                threshold=(
                    f"above {DEAD:.0%}: more than every second sample is wasted (the loss that "
                    "dynamic sampling avoids: DAPO, arXiv 2503.14476, section 3.2); measured: at "
                    "most 36 %"
                ),
                advice=(
                    'orchestrator.sampler.type = "difficulty_pools"; a larger group_size; '
                    "orchestrator.oversampling_factor keeps the batches full meanwhile"
                ),
                env=env,
            )


CLIPPED = 0.1
CLIPS = ("is_masked", "is_held", "clip_frac_low", "clip_frac_high")


def clip_share(run: History) -> Iterator[Verdict]:
    """The loss leaves many tokens out, as too far from the sampling policy."""
    for name in CLIPS:
        share = mean_of(run.values(name, run.late))
        if share > CLIPPED:
            yield Verdict(
                name="clip_share",
                finding="The trust region leaves out a large share of the tokens.",
                evidence=f"{name} {share:.1%} ({span(run.late)})",
                threshold=(
                    f"above {CLIPPED:.0%}; measured: at most 1 % over a window. Sequence-level "
                    "losses clip more by design: GSPO reports 15 % (arXiv 2507.18071, section 5.2)"
                ),
                advice=(
                    "lower trainer.optim.lr, trainer.epochs or orchestrator.max_off_policy_steps; "
                    "or widen the bounds in [trainer.loss]"
                ),
            )


AGED = 0.05
SKEW = 1.25


def staleness_bias(run: History) -> Iterator[Verdict]:
    """What is dropped for age differs from what trains."""
    live = [each for each in run.last_rollouts if each.rollout.is_live]
    aged = [each for each in live if each.dropped_by == STALE]
    kept = [each for each in live if each.dropped_by is None]
    cancelled = {env: increase(run, f"dispatcher/cancelled/{env}") for env in run.requested_envs}
    finished = sum(float(run.rows[step].get("batch/agg/seen", 0.0)) for step in run.late)
    lost = len(aged) / max(len(live), 1) + sum(cancelled.values()) / max(
        finished + sum(cancelled.values()), 1.0
    )
    if not kept or lost <= AGED:
        return
    ratio = mean_length(aged) / mean_length(kept) if aged else 1.0
    ages = np.array([each.step - 1 - each.rollout.policy_version for each in kept], float)
    lengths = np.array([each.rollout.num_trainable_tokens for each in kept], float)
    old = lengths[ages > ages.mean()].mean() / lengths.mean() if ages.std() > 0 else 1.0
    rates = {
        env: (sum(e.rollout.env == env for e in aged) + cancelled[env])
        / max(sum(e.rollout.env == env for e in live) + cancelled[env], 1.0)
        for env in run.requested_envs
    }
    worst = max(rates, key=lambda env: rates[env])
    others = [rate for env, rate in rates.items() if env != worst]
    if ratio < SKEW and old < SKEW and not (others and rates[worst] > 2 * max(others)):
        return
    shares = ", ".join(f"{env} {rate:.1%}" for env, rate in rates.items())
    advice = (
        "raise orchestrator.max_off_policy_steps; lower orchestrator.max_inflight_rollouts or "
        "oversampling_factor; bound the length by orchestrator.train.sampling."
        "max_completion_tokens"
    )
    partial = run.config.get("orchestrator", {}).get("partial_groups") or {}
    if partial.get("rest") == "cancel":
        advice = (
            'set orchestrator.partial_groups.rest = "group": the members that "cancel" cuts off '
            f"count as dropped here; {advice}"
        )
    yield Verdict(
        name="staleness_bias",
        finding=(
            "Rollouts that are dropped for their age differ from those that train: long or slow "
            "ones are missing from the gradient."
        ),
        evidence=(
            f"dropped for age: {shares} ({span(run.late)}); their mean length is {ratio:.2f} times "
            f"that of the kept ones, and the older half of the kept ones {old:.2f} times the mean"
        ),
        threshold=(
            f"more than {AGED:.0%} dropped, and a length ratio of {SKEW:g} or an env at twice the "
            "rate of the others. By convention; measured: nothing is dropped"
        ),
        advice=advice,
        env=worst if others else None,
    )


SAME = 0.2
SAME_GROWTH = 3.0
NEARLY_ALL = 0.9
EXAMPLES = 8


def duplicates(run: History) -> Iterator[Verdict]:
    """The same reply for different examples: often a hack of the reward."""
    before = by_env(run.first_rollouts)
    after = by_env(run.last_rollouts)
    for env, seen in after.items():
        share, reply, examples = most_common_reply(seen)
        start, _, _ = most_common_reply(before.get(env, []))
        has_grown = share > SAME and share > SAME_GROWTH * start
        if examples >= EXAMPLES and (has_grown or share > NEARLY_ALL):
            same = [each.rollout.reward for each in seen if each.reply == reply]
            rest = [each.rollout.reward for each in seen if each.reply != reply]
            pays = bool(rest) and np.mean(same) > np.mean(rest)
            what = "It pays: look for a hole in the reward." if pays else "It does not pay."
            yield Verdict(
                name="duplicates",
                finding=f"One reply answers many different examples. {what}",
                evidence=(
                    f"{share:.1%} of {examples} examples got the same {len(reply) // 4} tokens "
                    f"({span(run.late)}), {start:.1%} at first; its mean reward is "
                    f"{np.mean(same):.3g}, that of the others {np.mean(rest or [0.0]):.3g}"
                ),
                threshold=(
                    f"more than {SAME:.0%} of the examples and {SAME_GROWTH:g} times the share at "
                    f"first, or more than {NEARLY_ALL:.0%}; measured: at most 9 %"
                ),
                advice=(
                    "the taskset's reward function: `prime-rl report` shows these replies. Filter "
                    "repetition; a penalty that keeps the policy near its start (kl_to_initial)"
                ),
                env=env,
            )
