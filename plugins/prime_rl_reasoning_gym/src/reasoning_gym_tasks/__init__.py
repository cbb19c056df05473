# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers taskset ``reasoning-gym``: every generator of the package of that name.

    [[orchestrator.train.env]]
    id = "reasoning-gym"
    args = { task = "chain_sum", settings = { max_terms = 3 } }

The question is the prompt, the package's own scorer gives the reward. Metrics: ``exact`` (the
reward is 1), ``answered`` (an answer was found in the reply), ``scorer_error`` (the scorer raised
an exception, which counts as reward 0), and ``level`` where levels are set.

Several tasks: ``tasks = { chain_sum = { weight = 2 }, gcd = {} }``. A curriculum: ``levels = [0, 1,
2]`` makes rows that rise through these levels of the package's curriculum of the task.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from prime_rl import ConfigError, at_least
from reasoning_gym_tasks.generators import EntryPlace, Split, entry, rows, score, settings_error

INSTRUCTIONS: dict[str, str | None] = {"tag": SYSTEM_PROMPTS["default"], "reply": None}
"""The system prompt that asks for each form of an answer."""
SOLVED_SEED = -1
"""Seed of the solved examples: rows of a run seldom repeat them."""


class Generator(BaseModel):
    """One of several tasks of an env."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: PositiveFloat = 1.0
    """Its share of the rows, relative to the other tasks."""
    settings: dict[str, Any] = {}
    """Settings of the generator."""


class ReasoningGymTaskConfig(vf.TaskConfig):
    """``task = "chain_sum"`` is short for ``task = { name = "chain_sum" }``."""

    name: str = ""
    """The generator, as reasoning-gym calls it. Empty: ``tasks`` lists several."""
    answer: Literal["tag", "reply"] = "tag"
    """``tag``: the answer is what stands in the reply's last ``<answer>`` element. ``reply``: the
    whole reply."""


class ReasoningGymConfig(vf.TasksetConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "reasoning-gym"``."""

    task: ReasoningGymTaskConfig = ReasoningGymTaskConfig()
    """The generator's name, or a table with ``name`` and ``answer``."""
    settings: dict[str, Any] = {}
    """Settings of the generator ``task``: its difficulty. Unset ones have the package's default."""
    tasks: dict[str, Generator] = {}
    """Several generators by name, instead of ``task``."""
    levels: list[NonNegativeInt] = []
    """Levels of the package's curricula. The first share of ``num_examples`` has the first level,
    and so on. ``settings`` replace what a level says. Empty: no curriculum."""
    seed: int = 0
    """The rows and their order."""
    split: Split = "train"
    """``held_out``: questions that no ``train`` split contains, for any seed."""
    num_examples: PositiveInt | None = None
    """None: rows without end, each made when it is needed."""
    solved_examples: NonNegativeInt = 0
    """Solved entries of the task before the question, as earlier turns, for a policy that does not
    follow instructions. All rows of a task have the same ones."""
    instructions: str | None = None
    """The system prompt: a text, or the name of one of reasoning-gym's (``default``, ``direct``,
    ``simple``, ``chain_of_draft``, ``DeepSeekZero``). None: ``default`` if the answer is a tag,
    else no system prompt."""

    @field_validator("task", mode="before")
    @classmethod
    def _a_name_is_enough(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _tasks_exist(self) -> ReasoningGymConfig:
        if not self.id:
            return self  # verifiers makes one without settings to look at its defaults
        if bool(self.task.name) == bool(self.tasks):
            raise ValueError('set either task = "name" or tasks = { name = {}, ... }')
        if self.tasks and self.settings:
            raise ValueError("settings belong to task; write tasks = { name = { settings = {} } }")
        if len(self.levels) > 1 and self.num_examples is None:
            raise ValueError("levels share num_examples among them: set num_examples")
        for name, each in self.generators.items():
            for level in self.chosen_levels:
                reason = settings_error(name, each.settings, level)
                if reason:
                    raise ValueError(reason)

        return self

    @property
    def generators(self) -> Mapping[str, Generator]:
        """Each task's weight and settings."""
        return self.tasks or {self.task.name: Generator(settings=self.settings)}

    @property
    def chosen_levels(self) -> list[int | None]:
        """``levels``; without any, the generators' own defaults."""
        return [*self.levels] or [None]

    @property
    def system_text(self) -> str | None:
        """The system prompt of every row."""
        if self.instructions is None:
            return INSTRUCTIONS[self.task.answer]
        return str(SYSTEM_PROMPTS.get(self.instructions, self.instructions))


class ReasoningGymData(vf.TaskData):
    """One example: ``prompt`` is the question, ``name`` the task."""

    answer: str | None
    """The package's own answer. None: the task has many right ones, which the scorer knows."""
    place: dict[str, Any]
    """Fields of ``EntryPlace``: where the generator makes this entry."""


class ReasoningGymTask(vf.Task[ReasoningGymData, vf.State, ReasoningGymTaskConfig]):
    """Scores one reply."""

    @vf.stop
    async def answered_once(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def package_score(self, trace: vf.Trace) -> float:
        place = EntryPlace(**self.data.place)
        answer = self.answer_in(trace)
        try:
            reward = score(place, answer)
            failed = 0.0
        except Exception:  # a reply that the package's scorer cannot read is a wrong reply
            reward = 0.0
            failed = 1.0

        trace.record_metrics({"exact": float(at_least(reward, 1.0)), "scorer_error": failed})
        return reward

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(self.answer_in(trace)))

    def answer_in(self, trace: vf.Trace) -> str | None:
        """The answer in the last reply, or None."""
        reply: str = trace.last_reply
        answer: str | None = reply if self.config.answer == "reply" else extract_answer(reply)
        return answer.strip() if answer else None


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Rows of one split, the same for the same seed."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReasoningGymTask]:
        config = self.config
        count = config.num_examples
        levels = config.chosen_levels
        if count is None:
            return self.rows_of(levels[0])
        ends = [count * place // len(levels) for place in range(len(levels) + 1)]
        return itertools.chain.from_iterable(
            itertools.islice(self.rows_of(level), end - start)
            for level, start, end in zip(levels, ends[:-1], ends[1:], strict=True)
        )

    def rows_of(self, level: int | None) -> Iterator[ReasoningGymTask]:
        """Endless rows of one level; a weighted draw picks the task of each."""
        config = self.config
        generators = self.config.generators
        streams = {
            name: rows(name, each.settings, level=level, seed=config.seed, split=config.split)
            for name, each in generators.items()
        }
        weights = [each.weight for each in generators.values()]
        solved = {
            name: self.solved_turns(
                rows(name, each.settings, level=level, seed=SOLVED_SEED, split="train")
            )
            for name, each in generators.items()
        }
        draw = random.Random(f"{config.seed} {config.split} {level}")
        while True:
            (name,) = draw.choices(list(streams), weights)
            place = next(streams[name])
            data = ReasoningGymData(
                name=name,
                prompt=[*solved[name], user(place)] if solved[name] else entry(place)["question"],
                system_prompt=config.system_text,
                answer=entry(place)["answer"],
                place=dataclasses.asdict(place),
            )
            yield ReasoningGymTask(data, config.task)

    def solved_turns(self, places: Iterator[EntryPlace]) -> list[dict[str, str]]:
        """The first entries as questions of the user and right replies."""
        turns = []
        for place in itertools.islice(places, self.config.solved_examples):
            answer = entry(place)["answer"]
            if answer is None:
                raise ConfigError(
                    f"solved_examples: task {place.task!r} gives no answers, only scores; set it "
                    "to 0"
                )
            reply = answer if self.config.task.answer == "reply" else f"<answer>{answer}</answer>"
            turns += [user(place), {"role": "assistant", "content": reply}]

        return turns


def user(place: EntryPlace) -> dict[str, str]:
    """The question as a message."""
    return {"role": "user", "content": entry(place)["question"]}


__all__ = ["ReasoningGymTaskset"]
