"""Create ``tiny-chat``. It learns conversations of several tasks, with exactly the tokens that the
Qwen3 renderer gives them in a rollout. Imports torch and renderers; runs in a separate process.

Shapes: B = conversations of a batch, T = tokens of the longest one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from prime_rl import RunError
from prime_rl_environments.tasks import LOOKUP_SCHEMA
from prime_rl_environments.tiny import Recipe, TinyChatConfig
from prime_rl_environments.tiny.lessons import (
    AT_LEAST,
    OPEN_ENDED,
    Conversation,
    Lesson,
    Message,
    lessons,
)
from prime_rl_environments.tiny.make import (
    IGNORE,
    NO_THOUGHT,
    Progress,
    backward,
    build_model,
    build_optimizer,
    save,
    set_learning_rate,
    share_done,
    update,
)
from prime_rl_environments.tiny.tokenizer import build_tokenizer

WINDOW = 64
"""Number of latest conversations of a lesson over which its exact share is averaged."""

CALL_PHRASES = ('\n{"name": "', '", "arguments": {"', '": "', '"}}\n')
"""The fixed texts of Qwen3's tool calls."""

CHUNKS = 3
"""Parts of a batch, by length, that are padded separately."""

Piece = tuple[str, bool]
"""Text that is tokenized separately, and whether it is trained."""

Column = list[tuple[int, bool]]
"""The tokens of a conversation, and whether each is trained."""


def make_chat_model(
    config: TinyChatConfig, recipe: Recipe, directory: Path, *, seed: int, progress: Progress
) -> None:
    """Build, warm up and save; ``directory`` is complete once ``.ready`` is in it."""
    progress("building the model", 0.0)
    torch.set_num_threads(1)  # two spinning threads are slower than one at this size
    tokenizer = build_chat_tokenizer()
    model = build_model(recipe, tokenizer, seed)
    report = warm_up(model, tokenizer, config=config, recipe=recipe, seed=seed, progress=progress)
    save(model, tokenizer, directory=directory, report=report)
    progress("ready", 1.0)


def build_chat_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with a token for each fixed text of Qwen3's tool template: the
    description of ``get`` is 3 tokens instead of 600, a call 10 instead of 50."""
    return build_tokenizer([*tools_block(), *CALL_PHRASES])


def tools_block() -> tuple[str, str, str]:
    """The Qwen3 template's text about the ``get`` tool: before its schema, the schema, after it."""
    plain = build_tokenizer()
    renderer = create_renderer(plain, Qwen3RendererConfig())
    ids = renderer.render_ids([{"role": "user", "content": ""}], tools=[LOOKUP_SCHEMA])
    block = plain.decode(ids).split("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
    schema = json.dumps(LOOKUP_SCHEMA, ensure_ascii=False)
    before, after = block.split(schema)
    return before, schema, after


def pieces_of(conversation: Conversation, thinking: bool, tools: str) -> Iterator[Piece]:
    """The conversation's text, split where the renderer tokenizes separately.

    ``thinking`` is the renderer's ``enable_thinking``: if off, every reply begins with an empty
    thought. ``tools`` is the template's text about the tools. The line break after a reply is not
    sampled, and the last reply has none.
    """
    if conversation.tools:
        yield f"<|im_start|>system\n{tools}<|im_end|>\n", False
    for place, message in enumerate(conversation.messages):
        if message.role == "assistant":
            yield "<|im_start|>assistant\n" + ("" if thinking else NO_THOUGHT), False
            yield f"{message.text}<|im_end|>", message.trained
            yield ("\n" if place + 1 < len(conversation.messages) else ""), False
        else:
            yield from context_pieces(message)


def context_pieces(message: Message) -> Iterator[Piece]:
    """A message that the policy reads."""
    if message.role == "tool":
        yield "<|im_start|>user", False
        yield f"\n<tool_response>\n{message.text}\n</tool_response><|im_end|>\n", False
    else:
        yield f"<|im_start|>{message.role}\n{message.text}<|im_end|>\n", False


def encode(
    tokenizer: PreTrainedTokenizerFast, batch: Sequence[Conversation], tools: str
) -> list[Column]:
    """Every conversation's tokens. Thinking is off for every second conversation."""
    rows = [list(pieces_of(each, row % 2 == 0, tools)) for row, each in enumerate(batch)]
    texts = [text for row in rows for text, _ in row]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [[(token, trained) for _, trained in row for token in next(encoded)] for row in rows]


def pad(columns: Sequence[Column], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``labels``, each [B, T - 1]: right-padded, labels shifted, only trained
    replies labeled."""
    longest = max(map(len, columns))
    ids = torch.full((len(columns), longest), padding)
    labels = torch.full((len(columns), longest), IGNORE)
    for row, column in enumerate(columns):
        ids[row, : len(column)] = torch.tensor([token for token, _ in column])
        targets = [token if trained else IGNORE for token, trained in column[1:]]
        labels[row, : len(targets)] = torch.tensor(targets)
    return ids[:, :-1], labels[:, :-1]


def supervised_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, columns: Sequence[Column]
) -> list[bool]:
    """One update on all conversations. Returns whether each is exactly right.

    Conversations of similar length run together to save padding: they have 12 to 90 tokens.
    """
    order = sorted(range(len(columns)), key=lambda row: len(columns[row]))
    trained = [sum(is_trained for _, is_trained in column) for column in columns]
    right = [False] * len(columns)
    size = -(-len(columns) // CHUNKS)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        weight = sum(trained[row] for row in rows) / sum(trained)
        ids, labels = pad([columns[row] for row in rows], padding=0)
        for row, flag in zip(rows, backward(model, ids, labels=labels, weight=weight), strict=True):
            right[row] = bool(flag)

    update(model, optimizer)
    return right


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: TinyChatConfig,
    recipe: Recipe,
    *,
    seed: int,
    progress: Progress,
) -> dict[str, object]:
    """Supervised steps until ``warmup_exact`` of the latest conversations of every lesson are
    exactly right. Raises ``RunError`` after ``Recipe.warmup_max_steps``."""
    optimizer = build_optimizer(model, recipe)
    shares: dict[Lesson, deque[float]] = {kind: deque(maxlen=WINDOW) for kind in config.lessons}
    streams = {kind: lessons(kind, seed) for kind in config.lessons}
    exact: dict[Lesson, float] = dict.fromkeys(config.lessons, 0.0)
    targets = {name: target_of(name, config.warmup_exact) for name in config.lessons}
    kinds = timetable(exact, targets)
    tools = "".join(tools_block())
    for step in range(1, recipe.warmup_max_steps + 1):
        set_learning_rate(optimizer, recipe, step)
        names = list(islice(kinds, recipe.warmup_batch_size))
        columns = encode(tokenizer, [next(streams[name]) for name in names], tools)
        for name, right in zip(names, supervised_step(model, optimizer, columns), strict=True):
            shares[name].append(float(right))
        exact.update({name: sum(column) / WINDOW for name, column in shares.items()})
        lacking = max(targets[name] - exact[name] for name in config.lessons)
        progress("warming up the model", share_done(step / 150, 1.0 - max(0.0, lacking), 1.0))
        if lacking <= 0:
            return {"steps": step, "lessons": exact}

    raise RunError(
        f"tiny-chat: after {recipe.warmup_max_steps} supervised steps these shares of the "
        f"conversations are right: {exact}; expected {targets}. Lower "
        "model.warmup_exact."
    )


def target_of(lesson: Lesson, warmup_exact: float) -> float:
    """The share of a lesson's conversations that must be right; 0 for open-ended lessons."""
    return 0.0 if lesson in OPEN_ENDED else max(warmup_exact, AT_LEAST.get(lesson, 0.0))


def timetable(exact: Mapping[Lesson, float], targets: Mapping[Lesson, float]) -> Iterator[Lesson]:
    """The lessons in turn, endlessly. A lesson that has reached its target gets every fourth turn
    only. ``exact`` is read again at every turn."""
    for turn in count():
        for lesson, target in targets.items():
            if turn % 4 == 0 or exact[lesson] < target:
                yield lesson
