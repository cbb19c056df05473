"""Train from Python, then look at metrics, rollouts and weights. Two minutes on two CPU cores.

    python docs/examples/train_and_look.py [STEPS]

Run it in a checkout, or copy configs/reverse_text/grpo.toml.
"""

import sys

import prime_rl

REWARD = "train/agg/all/reward/mean"


def main(steps: int = 120) -> None:
    run = prime_rl.train("configs/reverse_text/grpo.toml", max_steps=steps)

    # Metrics: one row per step. `run.metrics.to_pandas()` if pandas is installed.
    rows = [row for row in run.metrics.to_pylist() if row[REWARD] is not None]
    print(f"\nreward at step {rows[0]['step']}: {rows[0][REWARD]:.3f}")
    print(f"reward at step {rows[-1]['step']}: {rows[-1][REWARD]:.3f}")
    for found in run.evals:
        print(f"held-out reward of version {found['policy_version']}: {found['reward']:.3f}")

    # Weights: a Hugging Face folder, with the tokenizer.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.weights)
    tokenizer = AutoTokenizer.from_pretrained(run.weights)
    print(f"{run.weights}: {model.num_parameters():,} parameters")

    # Rollouts: the best and the worst of the last step, with the credit of the reply's first token.
    rollouts = sorted(run.rollouts(step=run.step), key=lambda rollout: rollout.reward)
    for rollout in (rollouts[-1], rollouts[0]):
        turn = rollout.turns[-1]
        sample = rollout.samples[turn.sample]
        sampled = [place for place in range(turn.start, turn.end) if sample.loss_mask[place]]
        token_ids = [sample.token_ids[place] for place in sampled]
        reply = tokenizer.decode(token_ids, skip_special_tokens=True)
        credit = sample.advantages[sampled[0]]
        print(f"reward {rollout.reward:.2f}, credit {credit:+.2f}: {reply!r}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
