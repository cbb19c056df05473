"""Checks of the size of the updates, and of what waits for what."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prime_rl_tools.doctor.checks import DEAD, MISMATCH
from prime_rl_tools.doctor.history import REWARD, History
from prime_rl_tools.doctor.measures import (
    NOISE,
    Verdict,
    mean_of,
    median_of,
    share_of,
    span,
    teaching_share,
)

FALL = 0.2
UPSET = 2.0
SKIPPED = 0.1
FIRST = 4


def rate_too_high(run: History) -> Iterator[Verdict]:
    """The reward fell from its best, and the updates were large."""
    skipped = mean_of(run.values("optim/skipped", run.late))
    width = len(run.late)
    windows = [run.steps[i : i + width] for i in range(len(run.steps) - 2 * width + 1)]
    windows.append(run.steps[:FIRST])  # a run may collapse within its first window
    best = max(windows, key=lambda steps: mean_of(run.values(REWARD, steps)), default=run.early)
    change, errors = run.change(REWARD, best, run.late)
    top = mean_of(run.values(REWARD, best))
    parts = [run.steps[i : i + width] for i in range(0, len(run.steps), width)]
    mismatch = max(median_of(run.values("mismatch_kl/all/mean", part)) for part in parts)
    norms = [median_of(run.values("optim/grad_norm", steps)) for steps in (best, run.late)]
    large = mismatch > MISMATCH or norms[1] > UPSET * norms[0] > 0
    if (change < -FALL * abs(top) and errors < -NOISE and large) or skipped > SKIPPED:
        yield Verdict(
            name="rate_too_high",
            finding="The learning rate looks too high: the reward fell from its best.",
            evidence=(
                f"{REWARD} {top:.3g} ({span(best)}), {top + change:.3g} ({span(run.late)}); "
                f"largest mismatch_kl/all/mean of a window {mismatch:.3g}; optim/grad_norm "
                f"{norms[0]:.3g} and {norms[1]:.3g}; skipped steps {skipped:.0%}"
            ),
            threshold=(
                f"a fall by {FALL:.0%} and {NOISE:g} standard errors, with a mismatch above "
                f"{MISMATCH} or a gradient norm {UPSET:g} times that at the best; or {SKIPPED:.0%} "
                "skipped steps. Measured: the reward never fell by more than 3 %; at 14 times the "
                "learning rate it fell by 90 %, at a mismatch of 0.3"
            ),
            advice=(
                "divide trainer.optim.lr by 3 to 10, raise trainer.scheduler.warmup_steps, lower "
                "trainer.optim.max_norm"
            ),
        )


STILL = 1e-5
FLAT_STEPS = 16


def rate_too_low(run: History) -> Iterator[Verdict]:
    """Groups have credit, and neither the policy nor the reward moves."""
    steps = [s for s in run.at_peak if (run.rows[s].get("off_policy/mean") or 0.0) >= 0.5]
    moved = run.values("mismatch_kl/all/mean", steps)
    _, rise = run.change(REWARD, run.early, run.late)
    teaching = np.mean([teaching_share(run, env)[0] for env in run.envs] or [0.0])
    still = len(moved) >= FLAT_STEPS / 2 and float(np.median(moved)) < STILL
    if len(run.steps) >= FLAT_STEPS and still and abs(rise) < NOISE and teaching > DEAD:
        rate = median_of(run.values("optim/lr", run.late))
        yield Verdict(
            name="rate_too_low",
            finding=(
                "The learning rate looks too low: there is credit, and the policy does not move."
            ),
            evidence=(
                f"mismatch_kl/all/mean between versions: median {np.median(moved):.2g} "
                f"({span(steps)}); the reward changed by {rise:+.1f} standard errors; learning "
                f"rate {rate:.2g}"
            ),
            threshold=(
                f"a median below {STILL:g} per token for data at least half a version old, and a "
                "flat reward. PPO implementations aim at 1e-2 per update (target_kl); measured: "
                "1e-3 to 2e-2 in runs that learn, 6e-7 at a rate of 1e-6"
            ),
            advice="multiply trainer.optim.lr by 3 to 10",
        )


IDLE = 0.9


def starved(run: History) -> Iterator[Verdict]:
    """On accelerators, one side waits for the other nearly all the time."""
    if not len(run.values("perf/mfu", run.late)):
        return  # on CPUs both share the cores: the time that one waits is the other's
    trainer = share_of(run, ("wait/trainer/orchestrator",), "time/trainer/step")
    blocked = ("wait/orchestrator/trainer", "wait/orchestrator/trainer_room")
    engines = share_of(run, blocked, "time/step")
    for who, share, name, advice in (
        ("trainer", trainer, "wait/trainer/orchestrator",
         "more engines (inference.replicas, deployment.inference_gpus), fewer trainer_gpus, a "
         "larger orchestrator.max_inflight_rollouts, or deployment.colocated = true"),
        ("engines", engines, " + ".join(blocked),
         "more trainer_gpus or trainer.num_ranks, fewer inference_gpus, a larger "
         "trainer.micro_batch_tokens, or a higher orchestrator.max_off_policy_steps"),
    ):  # fmt: skip
        if share > IDLE:
            yield Verdict(
                name=f"{who}_starved",
                finding=f"The {who} {'waits' if who == 'trainer' else 'wait'} nearly all the time.",
                evidence=f"{name}: {share:.0%} of the step ({span(run.late)})",
                threshold=(
                    f"above {IDLE:.0%}: one of ten hours is used. By convention; only for runs on "
                    "accelerators, because processes on CPUs share the cores"
                ),
                advice=advice,
            )


CAUSES = ("pace/training", "pace/held", "pace/starved")
"""What the seconds of a step are spent on, as the trainer sees it."""
BOUND = {
    "pace/training": (
        "training-bound: the trainer trains for the largest part of a step",
        "more trainer_gpus or trainer.num_ranks, a larger trainer.micro_batch_tokens; or, if it "
        "never waits for a batch, fewer engines, which cost nothing then",
    ),
    "pace/starved": (
        "sampling-bound: the trainer waits because too few groups are complete",
        "more engines (inference.replicas, deployment.inference_gpus) if theirs are busy, else a "
        "larger orchestrator.max_inflight_rollouts; shorter replies (orchestrator.train.sampling."
        "max_completion_tokens)",
    ),
    "pace/held": (
        "held by a tail: complete groups wait for the places of a few long ones",
        "a higher orchestrator.max_off_policy_steps; a lower orchestrator.train.sampling."
        "max_completion_tokens, or a shorter timeout or max_turns of the env",
    ),
}
"""What sets the pace, and the keys that change it."""


def pace_line(run: History) -> str | None:
    """What most seconds of the last window were spent on, and the keys that change it. None: the
    run does not report it, for example because it has no rollouts."""
    seconds = {cause: float(run.values(cause, run.late).sum()) for cause in CAUSES}
    total = sum(seconds.values())
    if total <= 0:
        return None
    most = max(seconds, key=lambda cause: seconds[cause])
    shares = ", ".join(f"{cause} {spent / total:.0%}" for cause, spent in seconds.items())
    text, keys = BOUND[most]
    allowed = run.config.get("orchestrator", {}).get("max_off_policy_steps")
    if most == "pace/starved" and allowed in (0, 1):
        # Such a run requests one batch ahead at most, so it cannot tell a tail from slow engines.
        keys = (
            f"a higher orchestrator.max_off_policy_steps (it is {allowed}), if a batch waits for a "
            f"few long rollouts; {keys}"
        )
    return f"The run is {text} ({shares}, {span(run.late)}). To make it faster: {keys}."


HELD = 0.25


def held_by_tail(run: History) -> Iterator[Verdict]:
    """The trainer waits for groups that take longer than their age allows."""
    seconds = {cause: float(run.values(cause, run.late).sum()) for cause in CAUSES}
    share = seconds["pace/held"] / max(sum(seconds.values()), 1e-9)
    if share <= HELD:
        return
    envs = run.requested_envs
    by_env = {env: float(run.values(f"pace/held/{env}", run.late).sum()) for env in envs}
    slowest = max(by_env, key=lambda env: by_env[env], default=None)
    yield Verdict(
        name="held_by_tail",
        finding=(
            "A few long rollouts set the pace: other groups are complete, and the batch keeps "
            "places for those that no later batch may train."
        ),
        evidence=(
            f"pace/held: {share:.0%} of the time ({span(run.late)}); pace/training "
            f"{seconds['pace/training']:.3g} s, pace/starved {seconds['pace/starved']:.3g} s"
        ),
        threshold=(
            f"above {HELD:.0%}. With everything trained that was requested, a step takes at least "
            "the longest group over max_off_policy_steps + 1. By convention"
        ),
        advice=(
            "raise orchestrator.max_off_policy_steps; bound the length by "
            "orchestrator.train.sampling.max_completion_tokens, or the time by the env's timeout "
            "and max_turns"
        ),
        env=slowest if len(envs) > 1 else None,
    )
