# mypy: allow-subclassing-any, allow-untyped-decorators
"""verifiers' classes of the taskset ``function``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from function.check_args import rows_for
from function.groups import KEY, register
from function.load import as_paths, load_functions
from function.rewards import (
    COMPLETION_IDS,
    MESSAGES,
    PROMPT,
    REPLY,
    RewardFault,
    RewardFunction,
    added,
    check_weighted,
    check_weights,
    faults_of,
    terms_of,
)


class FunctionTaskConfig(vf.TaskConfig):
    """What scoring a reply needs. Filled from the env's own ``args``."""

    reward: list[str] = []
    functions: str | None = None
    weights: dict[str, float] = {}

    def load(self) -> tuple[RewardFunction, ...]:
        return load_functions(tuple(self.reward), self.functions)


class FunctionConfig(vf.TasksetConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "function"``; see ``FunctionArgs``."""

    data: str = ""
    reward: str | list[str] | None = None
    weights: dict[str, float] = Field(default_factory=dict)
    prompt_column: str = "prompt"
    system: str | None = None
    split: str | None = None
    subset: str | None = None
    first: NonNegativeInt = 0
    num_examples: PositiveInt | None = None
    in_process: bool = False
    functions: str | None = None
    task: FunctionTaskConfig = FunctionTaskConfig()

    @model_validator(mode="after")
    def _task_has_the_rewards(self) -> FunctionConfig:
        if self.id and not self.data:
            raise ValueError("data: set a file (.jsonl, .csv, .parquet) or a data set of the hub")
        update = {
            "reward": list(as_paths(self.reward)),
            "functions": self.functions,
            "weights": self.weights,
        }
        object.__setattr__(self, "task", self.task.model_copy(update=update))
        return self


class FunctionData(vf.TaskData):
    """One row. Columns that verifiers has no field for are fields; others are in ``columns``."""

    model_config = ConfigDict(frozen=True, extra="allow")

    columns: dict[str, Any] = Field(default_factory=dict)
    """Columns whose name is taken here: ``id``, ``name``, ``image`` ..."""

    @classmethod
    def of(cls, row: Mapping[str, Any], prompt: Any, system: str | None) -> FunctionData:
        taken = set(dir(cls)) | set(cls.model_fields) | {KEY}
        apart = {n: v for n, v in row.items() if n in taken or n.startswith("_")}
        fields = {n: v for n, v in row.items() if n not in apart}
        apart.pop(PROMPT, None)
        of_row = row.get("system_prompt")
        return cls(
            **fields,
            prompt=prompt,
            system_prompt=system if of_row is None else of_row,
            columns=apart,
        )

    def row(self) -> dict[str, Any]:
        """The columns as the data has them."""
        further: dict[str, Any] = self.model_extra or {}
        columns = {name: value for name, value in further.items() if name != KEY}
        return columns | dict(self.columns)


class FunctionTask(vf.Task[FunctionData, vf.State, FunctionTaskConfig]):
    """Scores one reply."""

    @vf.reward
    async def given_functions(self, trace: vf.Trace) -> Mapping[str, float]:
        """Record the terms of every function, each with its own weight."""
        functions = self.config.load()
        single = [each for each in functions if not each.is_group]
        if not single:
            return {}
        available = self.available(trace)
        if (
            any(COMPLETION_IDS in each.required for each in single)
            and not available[COMPLETION_IDS]
        ):
            raise RewardFault(
                "a reward takes completion_ids, and this endpoint gives none (client = 'chat')"
            )
        results = await asyncio.gather(*(self.call(each, available) for each in single))
        terms = added(results)
        if len(single) == len(functions):
            check_weighted(terms, self.config.weights)
        for name, value in terms.items():
            trace.record_reward(name, value, self.config.weights.get(name, 1.0))
        return {}

    async def call(
        self, function: RewardFunction, available: Mapping[str, Any]
    ) -> dict[str, float]:
        """The terms of one function. Its exceptions are raised again with its name and the row."""
        row = "?" if self.data.idx is None else str(self.data.idx + 1)
        try:
            with faults_of(function):
                return terms_of(function, await function(**available))
        except RewardFault as fault:
            raise RewardFault(f"row {row}: {fault}") from fault.__cause__

    def available(self, trace: vf.Trace) -> dict[str, Any]:
        """What a function may take, by name."""
        messages = [message.model_dump(exclude_none=True) for message in trace.messages]
        prompt = self.data.model_dump(mode="json", include={PROMPT}, exclude_none=True)[PROMPT]
        row: dict[str, Any] = self.data.row()
        return row | {
            REPLY: trace.last_reply,
            PROMPT: prompt,
            MESSAGES: messages,
            COMPLETION_IDS: sampled_ids(trace),
        }


def sampled_ids(trace: vf.Trace) -> list[int]:
    """Every token that the policy sampled, in order."""
    return [
        token
        for node in trace.nodes
        if node.sampled
        for token, is_sampled in zip(node.token_ids, node.mask, strict=True)
        if is_sampled
    ]


class FunctionTaskset(vf.Taskset[FunctionTask, FunctionConfig]):
    """The rows of the data, in their order."""

    def __init__(self, config: FunctionConfig) -> None:
        super().__init__(config)
        check_weights(config.weights)
        self.RUNS_IN_PROCESS = config.in_process
        config.task.load()  # a function that cannot be loaded is found here, not at each rollout

    def load(self) -> Iterator[FunctionTask]:
        config = self.config
        rows = rows_for(config)
        origin = (config.data, config.task.reward, config.functions)
        key = register(config.task.load(), config.weights, rows=rows, origin=origin)
        for row in rows:
            data = FunctionData.of(row, row[config.prompt_column], config.system)
            if key is not None and data.model_extra is not None:
                data.model_extra[KEY] = key
            yield FunctionTask(data, config.task)


__all__ = ["FunctionTaskset"]
