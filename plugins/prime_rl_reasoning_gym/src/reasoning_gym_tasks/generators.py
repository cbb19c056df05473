"""Endless rows of reasoning-gym's generators, and their scorers. Imports no verifiers.

A generator of the package makes a fixed number of entries for one seed. ``rows`` chains blocks of
``BLOCK`` entries, each block with a seed of its own. A row is named by ``EntryPlace`` (generator,
settings, seed, index), from which ``entry`` makes it again: nothing but the place has to travel to
the process that scores, and entries whose metadata JSON would change (tuples, integer keys) are
scored like all others.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from reasoning_gym.factory import CURRICULA, DATASETS

from prime_rl import ConfigError

Split = Literal["train", "held_out"]

BLOCK = 500
"""Entries of one seed: the package's default size. Some generators make all of them at once."""
HELD_OUT_ONE_IN = 8
MAX_BLOCKS_WITHOUT_A_ROW = 4

NAMES = tuple(sorted(set(DATASETS) - {"composite"}))
"""The tasks. ``composite`` mixes others, which the taskset does itself."""


@dataclasses.dataclass(frozen=True)
class EntryPlace:
    """The coordinates of one entry: equal coordinates make an equal entry."""

    task: str
    settings: str
    """JSON of the generator's settings, without ``seed`` and ``size``."""
    level: int | None
    """Level of the task's curriculum. None: the generator's own defaults."""
    seed: int
    index: int


def settings_error(task: str, settings: Mapping[str, Any], level: int | None) -> str | None:
    """The reason why no generator can be made of these, or None."""
    if task not in NAMES:
        close = difflib.get_close_matches(task, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"tasks are: {', '.join(NAMES)}"
        return f"reasoning-gym has no task {task!r}; {hint}"

    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    unknown = sorted(set(settings) - known)
    if unknown:
        problem = f"task {task!r} has no setting {unknown[0]!r}"
        return f"{problem}; its settings are: {', '.join(sorted(known)) or 'none'}"

    if level is not None and task not in CURRICULA:
        return f"task {task!r} has no curriculum, so levels cannot be set; use settings"
    try:
        _config(task, json.dumps(settings), level, seed=0)
    except (AssertionError, TypeError, ValueError) as error:
        at = "" if level is None else f" at level {level}"
        return f"task {task!r} refuses its settings{at}: {error}"

    return None


def rows(
    task: str, settings: Mapping[str, Any], level: int | None, seed: int, split: Split
) -> Iterator[EntryPlace]:
    """Endless places of one split, the same for the same arguments.

    The checksum of its question decides an entry's split, so that no seed of one split gives a
    question of the other. Raises ``ConfigError`` if ``MAX_BLOCKS_WITHOUT_A_ROW`` blocks have no row
    of the split.
    """
    text = json.dumps(settings, sort_keys=True)
    seeds = random.Random(f"{task} {seed}")
    empty = 0
    while empty < MAX_BLOCKS_WITHOUT_A_ROW:
        block_seed = seeds.getrandbits(31)
        num_rows = 0
        for index in range(BLOCK):
            place = EntryPlace(task, text, level=level, seed=block_seed, index=index)
            try:
                question = entry(place)["question"]
            except IndexError:  # fewer entries than asked for, as word_ladder may have
                break
            if split_of(question) == split:
                num_rows += 1
                yield place

        empty = 0 if num_rows else empty + 1

    raise ConfigError(
        f"task {task!r} with settings {text}: {MAX_BLOCKS_WITHOUT_A_ROW * BLOCK} entries have no "
        f"{split!r} row, because too few questions differ. Use settings that allow more questions."
    )


def split_of(question: str) -> Split:
    """The split of a question. About one in eight is held out."""
    return "held_out" if zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0 else "train"


@lru_cache(maxsize=8192)
def entry(place: EntryPlace) -> dict[str, Any]:
    """The entry: ``question``, ``answer`` (None where only the scorer knows) and ``metadata``.

    Raises ``IndexError`` beyond the last entry of the seed."""
    made: dict[str, Any] = _dataset(place.task, place.settings, level=place.level, seed=place.seed)[
        place.index
    ]
    return made


def score(place: EntryPlace, answer: str | None) -> float:
    """The package's own score of an answer, usually 0 to 1.

    Raises what the scorer raises: some fail on an answer of another form than they expect.
    """
    dataset = _dataset(place.task, place.settings, level=place.level, seed=place.seed)
    return float(dataset.score_answer(answer, entry(place)))


@lru_cache(maxsize=64)
def _dataset(task: str, settings: str, level: int | None, seed: int) -> Any:
    return DATASETS[task][0](_config(task, settings, level=level, seed=seed))


def _config(task: str, settings: str, level: int | None, seed: int) -> Any:
    """The generator's own config, validated. Settings replace what the level says."""
    fields = {**json.loads(settings), "seed": seed, "size": BLOCK}
    if level is None:
        config = DATASETS[task][1](**fields)
    else:
        curriculum = CURRICULA[task]()
        curriculum.set_global_level(level)
        config = dataclasses.replace(curriculum.generate_configuration({"seed": seed}), **fields)

    if hasattr(config, "validate"):  # two configs have none
        config.validate()
    return config
