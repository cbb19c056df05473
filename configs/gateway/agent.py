"""An agent that lives elsewhere: it reverses words, and knows how good it was."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai


def episode(gateway: httpx.Client, models: openai.OpenAI, task: int) -> float:
    """One conversation with the policy, and its reward."""
    opened = gateway.post("/sessions", json={"task": task})
    opened.raise_for_status()
    session = opened.json()
    word = session["fields"]["prompt"]

    policy = models.with_options(base_url=session["base_url"], api_key=session["api_key"])
    reply = policy.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": word}]
    )

    text = (reply.choices[0].message.content or "").strip()
    right = sum(ours == theirs for ours, theirs in zip(text, reversed(word), strict=False))
    reward = right / max(len(text), len(word))
    gateway.post(f"/sessions/{session['id']}/reward", json={"reward": reward}).raise_for_status()
    return reward


if __name__ == "__main__":
    number = int(sys.argv[1])  # of words; eight sessions each, which are compared with each other
    key = os.environ["PRIME_RL_GATEWAY_KEY"]
    client = httpx.Client(
        base_url=os.environ["PRIME_RL_GATEWAY"],
        headers={"Authorization": f"Bearer {key}"},
        timeout=600.0,
    )
    models = openai.OpenAI(api_key=key)
    tasks = [task for task in range(number) for _ in range(8)]
    with ThreadPoolExecutor(32) as agents:
        rewards = [*agents.map(lambda task: episode(client, models, task), tasks)]
    print(f"mean reward {sum(rewards) / len(rewards):.3f}")
