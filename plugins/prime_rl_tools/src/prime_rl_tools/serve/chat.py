"""``prime-rl chat``: ask a run's policy before and after training the same questions.

    run -> its engine, twice: first weights, trained weights -> one prompt -> two replies
                                    chat template of the trained model

Both models get the same tokens: the exported model's chat template gives the prompts of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.scratch import Scratch
from prime_rl_app.api import Run
from prime_rl_tools.replay.score import read_run_config
from prime_rl_tools.serve.request import read_settings
from prime_rl_tools.serve.server import (
    Server,
    ended_together,
    make_server,
    start_engine,
    wait_until_healthy,
)

TIMEOUT = 600.0
"""Seconds for one reply."""

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """How both models are asked."""

    system: str | None = None
    temperature: float = 0.0
    max_tokens: int = 256
    seed: int = 0


@dataclass
class ChatSide:
    """One model, and what was said to and by it."""

    label: str
    server: Server
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, tokenizer: Any, options: ChatOptions, context: int) -> str:
        """Say something, and return the reply. Raises ``RunError``."""
        start = [{"role": "system", "content": options.system}] if options.system else []
        messages = [*(self.messages or start), {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        room = context - len(ids)
        if room < 1:
            raise RunError(
                f"{self.label}: the conversation has {len(ids)} tokens, and the context is "
                f"{context}. Type /new for a new one."
            )

        reply = tokenizer.decode(self._sample(ids, min(options.max_tokens, room), options))
        reply = _without_special(reply, tokenizer)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def _sample(self, ids: Sequence[int], most: int, options: ChatOptions) -> list[int]:
        sampling = {"temperature": options.temperature, "max_tokens": most, "seed": options.seed}
        headers = {"Authorization": f"Bearer {self.server.api_key or self.server.admin_key}"}
        answer = httpx.post(
            f"{self.server.url}/inference/v1/generate",
            json={"token_ids": list(ids), "sampling_params": sampling},
            headers=headers,
            timeout=TIMEOUT,
            trust_env=False,
        )
        if not answer.is_success:
            raise RunError(f"{self.label}: the engine answers {answer.status_code}: {answer.text}")
        return list(answer.json()["choices"][0]["token_ids"])


def _without_special(text: str, tokenizer: Any) -> str:
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text.strip()


@dataclass
class Conversation:
    """A conversation with every model at once."""

    sides: list[ChatSide]
    tokenizer: Any
    context: int
    options: ChatOptions

    def ask(self, text: str) -> list[str]:
        """The replies, in the order of ``sides``. Raises ``RunError``."""
        said = (side.ask(text, self.tokenizer, self.options, self.context) for side in self.sides)
        return list(said)

    def forget(self) -> None:
        """Begin a new conversation."""
        for side in self.sides:
            side.messages = []


@contextmanager
def opened(
    run: Run, overrides: Sequence[str], options: ChatOptions, tell: Callable[[str], None]
) -> Iterator[Conversation]:
    """Start the engines of a run, and end them at the end. ``overrides``: options of ``prime-rl
    serve``. Raises ``ConfigError`` or ``RunError``."""
    from transformers import AutoTokenizer

    config = read_run_config(run.path)
    folders = _folders(run)
    tokenizer = AutoTokenizer.from_pretrained(str(run.weights), local_files_only=True)
    with Scratch("prime-rl-chat-") as logs, ended_together() as engines:
        sides = []
        for number, (label, folder) in enumerate(folders.items()):
            settings = read_settings(str(folder), overrides, _engine_of(config))
            server = make_server(settings)
            log = logs.path / f"{number}.log"
            tell(f"starting {label}: {folder}")
            engines.append(start_engine(server, folder, context=config.seq_len, log=log))
            sides.append(ChatSide(label, server))
            try:
                wait_until_healthy(server, engines[-1])
            except RunError as error:
                said = log.read_text("utf-8", errors="replace")
                raise RunError(f"{error}\n{said[-2000:]}") from error

        yield Conversation(sides, tokenizer, context=config.seq_len, options=options)


def _folders(run: Run) -> Mapping[str, Path]:
    """Model folders by label. Raises ``RunError`` if a model is not there."""
    configs = run.path / "configs"
    # A resumed run starts from a checkpoint: the first attempt knows the first weights.
    first = configs / "launch.attempt_1.json"
    path = first if first.exists() else configs / "launch.json"
    try:
        launch: Launch = read_table(path, Launch)
    except (OSError, RunError) as error:
        raise RunError(f"{run.path}: not a run that has started: {error}") from error

    before = launch.initial

    if not (before / "config.json").is_file():
        raise RunError(
            f"{before}: the model that the run began with is not there any more "
            f"({path} names this folder)"
        )
    return {"before": before, f"after step {run.step}": run.weights}


def _engine_of(config: RunConfig) -> dict[str, Any]:
    """The run's engine. Raises ``ConfigError`` if the run started none."""
    if config.inference.base_url is not None:
        raise ConfigError(
            "the run used engines that were there (inference.base_url), so its config starts none. "
            "Serve the weights: prime-rl serve RUN"
        )
    return {"engine": config.inference.engine}
