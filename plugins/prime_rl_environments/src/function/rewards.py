"""Reward functions: what each is called with, and what it may return. Imports no verifiers.

    def exact(reply, answer): ...           one reply; ``answer`` is a column of the row
    async def judged(messages, **row): ...  sync or async; ``**row``: everything
    def shortest(replies): ...              ``replies``: a group reward, called once per group

A function is called with the arguments that its parameters name. It returns a number, or a dict of
named terms; a group reward returns a list with one of these per reply. Which of both a function is
depends on its parameters alone: a group reward has the parameter ``replies``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import difflib
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl import ConfigError

REPLY = "reply"
REPLIES = "replies"
PROMPT = "prompt"
MESSAGES = "messages"
COMPLETION_IDS = "completion_ids"

ONE = (REPLY, PROMPT, MESSAGES, COMPLETION_IDS)
"""What a reward of one reply may name beside the columns."""

GROUP = (REPLIES, PROMPT, MESSAGES, COMPLETION_IDS)
"""What a group reward may name; ``messages`` and ``completion_ids`` have an entry per reply."""

OTHER_NAMES = {
    "completion": REPLY,
    "completions": f"{REPLY}' (one text) or '{REPLIES}",
    "output": REPLY,
    "response": REPLY,
    "responses": REPLIES,
    "text": REPLY,
    "prompts": PROMPT,
    "question": PROMPT,
    "completions_ids": COMPLETION_IDS,
    "token_ids": COMPLETION_IDS,
    "conversation": MESSAGES,
}
"""What other libraries and habits call our arguments."""

LARGEST = 1e18
"""A group's rewards are squared and added in float32."""

MOST_TERMS = 1000


class RewardFault(Exception):
    """A reward function returned what is no reward."""


@dataclass(frozen=True)
class RewardFunction:
    """One reward function, and what it is called with."""

    name: str
    """The name of its term, where it returns a number."""
    function: Callable[..., Any]
    required: tuple[str, ...]
    """Parameters without a default."""
    optional: tuple[str, ...]
    positional: tuple[str, ...]
    """The leading parameters that can only be given by position."""
    takes_all: bool
    """It has ``**kwargs``."""
    bound: frozenset[str] = frozenset()
    """Parameters that a ``functools.partial`` has set. A column of the same name does not set
    them."""

    @property
    def is_group(self) -> bool:
        return REPLIES in (*self.required, *self.optional)

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    @property
    def given(self) -> tuple[str, ...]:
        """Names that core has for it."""
        return GROUP if self.is_group else ONE

    async def __call__(self, **available: Any) -> Any:
        """Call it with what its parameters name: copies, so that one that changes a list changes
        it for no other call. Raises what it raises."""
        names = [n for n in available if self.takes_all or n in self.parameters]
        names = [n for n in names if n not in self.bound]
        copies = {name: copy.deepcopy(available[name]) for name in names}
        by_position = [copies.pop(name) for name in self.positional if name in copies]
        result = self.function(*by_position, **copies)
        return await result if inspect.isawaitable(result) else result


def reward_function(function: Any, name: str, where: str) -> RewardFunction:
    """Read a function's parameters. Raises ``ConfigError`` if it cannot be called by name."""
    if not callable(function):
        raise ConfigError(
            f"{where}: expected a function, found {_shown(function)}. Give the function itself."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: its parameters cannot be read ({error}). Write a function around it that "
            "names what it takes, such as reply."
        ) from error

    required: list[str] = []
    optional: list[str] = []
    positional: list[str] = []
    takes_all = False
    bound = frozenset(function.keywords if isinstance(function, functools.partial) else ())
    for each in parameters:
        if each.name in bound:
            continue
        if each.kind is each.VAR_POSITIONAL:
            raise ConfigError(
                f"{where}: it takes *{each.name}, and rewards are called by name. Name what it "
                f"takes: {', '.join(ONE)} or a column."
            )
        if each.kind is each.VAR_KEYWORD:
            takes_all = True
            continue
        if each.kind is each.POSITIONAL_ONLY:
            if each.default is not each.empty:
                # Whether it is given decides where the next one goes: a name would be clearer.
                raise ConfigError(
                    f"{where}: its parameter {each.name!r} can be given by position only, and has "
                    "a default. Remove the '/'."
                )
            positional.append(each.name)
        (required if each.default is each.empty else optional).append(each.name)

    made = RewardFunction(
        name=name,
        function=function,
        required=tuple(required),
        optional=tuple(optional),
        positional=tuple(positional),
        takes_all=takes_all,
        bound=bound,
    )
    if REPLY in made.parameters and REPLIES in made.parameters:
        raise ConfigError(
            f"{where}: it takes both 'reply' (one reply) and 'replies' (those of a whole group). "
            "Which is meant is not clear: keep one of them."
        )
    return made


def reward_functions(functions: Sequence[Any], where: str = "reward") -> list[RewardFunction]:
    """All functions of an env, each with a name of its own. Raises ``ConfigError``."""
    if not functions:
        raise ConfigError(f"{where}: expected at least one function, got none")
    made: list[RewardFunction] = []
    names: set[str] = set()
    for number, function in enumerate(functions):
        label = where if len(functions) == 1 else f"{where}[{number}]"
        base = name_of(function)
        name = base
        copies = 1
        while name in names:
            copies += 1
            name = f"{base}_{copies}"
        names.add(name)
        made.append(reward_function(function, name, f"{label} ({name})"))
    return made


def name_of(function: Any) -> str:
    """The name of a function's term; a lambda, an object or a partial has a plain one."""
    inner = function
    while hasattr(inner, "func") and not hasattr(inner, "__name__"):  # functools.partial
        inner = inner.func
    name = getattr(inner, "__name__", "") or type(inner).__name__
    return name if name.isidentifier() else "reward"


# -- what a function raises ----------------------------------------------------------------------

TRAVELED = "<dynamic-code>"
"""cloudpickle's name for the file of a function that has traveled."""


@contextmanager
def faults_of(function: RewardFunction) -> Iterator[None]:
    """What the function raises inside becomes a ``RewardFault`` that names it and the line.
    ``SystemExit`` and ``KeyboardInterrupt`` too: they would end the process, and the run with
    it."""
    try:
        yield
    except (RewardFault, GeneratorExit):  # the latter: the caller is being closed
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        error = _raised_in_a_task(error)
        raised = f"{type(error).__name__}: {_text(error)}".removesuffix(": ")
        raise RewardFault(f"reward {function.name} raised {raised}{_line(error)}") from error


def _raised_in_a_task(error: BaseException) -> BaseException:
    """Of an exit in a task that the function has started, what it was before core contained it."""
    from prime_rl.env.environment import EnvironmentExit

    cause = error.__cause__ if isinstance(error, EnvironmentExit) else None
    return error if cause is None else cause


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, and not only something that it awaits."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


def _text(error: BaseException) -> str:
    """Making its text is the user's code, too."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def _line(error: BaseException) -> str:
    """The line of the user's code that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    between = (*map(str, Path(__file__).parent.glob("*.py")), *_LIBRARY)
    outside = [frame for frame in frames if not frame.filename.startswith(between)]
    if not outside:
        return ""
    last = next((frame for frame in reversed(outside) if frame.filename == TRAVELED), outside[-1])
    file = "the script or cell" if last.filename == TRAVELED else last.filename
    return f" (line {last.lineno} of {file})"


_LIBRARY = (str(Path(asyncio.__file__).parent), concurrent.futures.__path__[0])
"""What runs a function in a thread."""


# -- what the rows must have ---------------------------------------------------------------------


def check_columns(
    functions: Iterable[RewardFunction], rows: Sequence[Mapping[str, Any]], where: str = "reward"
) -> None:
    """Every required parameter is an argument of ours or a column of every row, and no column that
    a function names has the name of such an argument. Raises ``ConfigError``."""
    shared: set[str] = set(rows[0]) if rows else set()
    for row in rows:
        shared &= row.keys()
    every = {name for row in rows for name in row}

    for function in functions:
        label = f"{where} ({function.name})"
        for name in function.parameters:
            ours = name in function.given
            if ours and name != PROMPT and name in every:
                raise ConfigError(
                    f"{label}: its parameter {name!r} is what the policy wrote, and the data has a "
                    f"column {name!r} too. Which is meant is not clear: rename the column."
                )

        for name in function.required:
            if name in function.given or name in shared:
                continue
            if name in every:
                number = next(n for n, row in enumerate(rows, 1) if name not in row)
                raise ConfigError(
                    f"{label}: row {number} has no column {name!r}, which it takes; other rows "
                    "have it. Fill the column, or give the parameter a default."
                )
            raise ConfigError(
                f"{label}: its parameter {name!r} is no column of the data, whose columns are "
                f"{', '.join(sorted(every)) or 'none'}, nor one of {', '.join(function.given)}."
                f"{_hint(name, [*every, *function.given])}"
            )


def _hint(name: str, known: Sequence[str]) -> str:
    if name in OTHER_NAMES:
        return f" It is called '{OTHER_NAMES[name]}' here."
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_weights(weights: Mapping[str, float], where: str = "weights") -> None:
    """Raises ``ConfigError`` unless every weight is a finite number."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{where}.{name}: expected a number, got {_shown(weight)}")
        if not abs(weight) <= LARGEST:
            raise ConfigError(
                f"{where}.{name}: expected a finite number, at most {LARGEST:g} in size, got "
                f"{_shown(weight)}"
            )


# -- what a function may return ------------------------------------------------------------------


def terms_of(function: RewardFunction, result: Any) -> dict[str, float]:
    """The named terms of one result of a function. Raises ``RewardFault``."""
    if not isinstance(result, Mapping):
        return {function.name: number_of(function.name, result)}
    if not result:
        raise RewardFault(f"{function.name} returned an empty dict; expected at least one term")
    if len(result) > MOST_TERMS:
        raise RewardFault(
            f"{function.name} returned {len(result)} terms; at most {MOST_TERMS} make sense, as "
            "each is a metric"
        )
    for name in result:
        if not isinstance(name, str) or not name:
            raise RewardFault(
                f"{function.name} returned a term called {_shown(name)}; expected a name"
            )
    return {name: number_of(f"{function.name}[{name!r}]", value) for name, value in result.items()}


def number_of(label: str, value: Any) -> float:
    """A reward as a float. Raises ``RewardFault``."""
    is_number = hasattr(value, "__float__") and getattr(value, "shape", ()) == ()
    if not is_number:
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that it was never awaited, at some later time
            raise RewardFault(
                f"{label} returned the coroutine {value.__qualname__}(), which nothing awaited; "
                "expected a number. Write async def, and await it."
            )
        way_out = "Return a number or a dict of named numbers."
        if isinstance(value, list | tuple) or hasattr(value, "shape"):
            way_out = "A reward of the whole group names 'replies' among its parameters."
        elif value is None:
            way_out = "Does it end without a return?"
        raise RewardFault(f"{label} returned {_shown(value)}; expected a number. {way_out}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFault(f"{label} returned {_shown(value)}, which is no float: {error}") from None
    if not math.isfinite(number):
        raise RewardFault(f"{label} returned {number}; expected a finite number")
    if abs(number) > LARGEST:
        raise RewardFault(f"{label} returned {number:g}; expected at most {LARGEST:g} in size")
    return number


def terms_of_group(
    function: RewardFunction, result: Any, num_replies: int
) -> list[dict[str, float]]:
    """The terms of each reply, from the result of a group reward. Raises ``RewardFault``."""
    values = result.tolist() if hasattr(result, "tolist") else result
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list:
        raise RewardFault(
            f"{function.name} takes 'replies' and returned {_shown(result)}; expected a list with "
            f"a reward for each of the {num_replies} replies"
        )
    if len(values) != num_replies:
        raise RewardFault(
            f"{function.name} returned {len(values)} rewards for {num_replies} replies; expected "
            "one for each"
        )
    return [terms_of(function, value) for value in values]


def added(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The terms of all functions. Raises ``RewardFault`` if two have one name."""
    total: dict[str, float] = {}
    for each in terms:
        for name, value in each.items():
            if name in total:
                raise RewardFault(f"two rewards have a term {name!r}; give each its own name")
            total[name] = value
    return total


def check_weighted(terms: Mapping[str, float], weights: Mapping[str, float]) -> None:
    """Raises ``RewardFault`` if a weight is for a term that nothing returned."""
    missing = [name for name in weights if name not in terms]
    if missing:
        raise RewardFault(
            f"weights names {missing[0]!r}, which no reward returned; the terms are: "
            f"{', '.join(terms)}"
        )


def _shown(value: Any) -> str:
    """A value's type and text, in one short line."""
    try:
        text = repr(value)
    except Exception:
        return type(value).__name__
    text = " ".join(text.split())
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{type(value).__name__} {text}"
