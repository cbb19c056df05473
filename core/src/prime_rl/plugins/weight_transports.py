"""Weight transports: new weights from the trainer to the engines without files.

    trainer, rank 0     WeightSender     wait for the engines -> send every tensor
    orchestrator        WeightDelivery   bring the engines and the trainer together

Files are the default and need no transport. They are also the fallback: a version that a transport
does not deliver is written as files. So are checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import msgspec

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """A published version: what an engine loads."""

    directory: Path
    version: int


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16."""
    shape: list[int]


Header = list[TensorInfo]
"""All tensors of a version, in the order in which they are sent."""


class Receives(msgspec.Struct):
    """How an engine can receive weights: ``receives`` in its ``GET /health``."""

    workers: int
    """Processes, each of which receives all weights."""
    backends: list[str]


class ReceivingEngine(Protocol):
    """An engine, as a transport sees it."""

    @property
    def url(self) -> str:
        """Without ``/v1``."""
        ...

    @property
    def receives(self) -> Receives | None:
        """None: files only."""
        ...

    @property
    def session(self) -> object:
        """A new object each time the engine joins the fleet."""
        ...


AnyEngine = TypeVar("AnyEngine", bound=ReceivingEngine)
Update = Callable[[AnyEngine, Weights, Mapping[str, Any]], Coroutine[Any, Any, None]]
"""Sends ``/update_weights`` to an engine; the mapping becomes the ``meeting`` of its body."""


class WeightDelivery(ABC):
    """The orchestrator's part of a transport."""

    timeout: float
    """``weight_broadcast.timeout``: how long an engine that joins waits for files."""

    @abstractmethod
    def check(self, engine: ReceivingEngine) -> None:
        """Raises ``EngineError`` for an engine that cannot receive this way."""

    @abstractmethod
    async def deliver(
        self, weights: Weights, engines: Sequence[AnyEngine], update: Update[AnyEngine]
    ) -> tuple[list[AnyEngine], dict[AnyEngine, BaseException]]:
        """Have the trainer send a version to ``engines``.

        Returns the engines that have to load the version's files, which exist by then, and the
        reason for each engine without the version. Raises ``EngineError`` if no engine has it and
        the trainer continued with the next version.
        """


class WeightSender(ABC):
    """The trainer's part of a transport."""

    device: torch.device | None = None
    """Where ``send`` gets the tensors; None: on the host."""

    @abstractmethod
    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        """On rank 0, after the version in ``directory`` was announced: wait for the engines.

        Returns the argument ``order`` of ``send``; None if ``files_wanted`` became true first: the
        trainer then writes files.
        """

    @abstractmethod
    def send(self, order: object, header: Header, tensors: Iterator[torch.Tensor]) -> None:
        """On rank 0: send the tensors in the order of ``header``, rounded to its types. Raises
        ``WeightsError`` or ``OSError`` if an engine did not get them: files follow."""


class WeightTransport(Offer):
    """How new weights reach the engines without files. Keep ``import torch`` inside ``sender``.

    Offer the plugin under ``prime_rl`` and ``prime_rl.trainer``: both sides call its hook.
    """

    shares_gpus: ClassVar[bool] = False
    """Whether it can send between processes that take turns on one GPU (``deployment.colocated``):
    when the engines wake, the trainer's tensors lie on the host."""

    def check(self, device: str) -> None:
        """Refuse a ``trainer.device`` (``auto``, ``cpu``, ``cuda``) that cannot send. Raises
        ``ConfigError``, or warns with ``ConfigWarning``."""

    def compare(self, trainer: Mapping[str, str], engines: Mapping[str, str]) -> str | None:
        """What the libraries of the two sides mean for this transport, in words; None: nothing.

        Both map ``torch`` and ``NCCL`` to installed versions, without what is not known.
        """
        return None

    def delivery(self, broadcasts: Path, timeout: float) -> WeightDelivery:
        """The orchestrator's part. ``broadcasts``: the folder of the run's versions. ``timeout``:
        seconds for all engines to come, and for each message."""
        raise NotImplementedError

    def sender(self, device: torch.device) -> WeightSender:
        """The trainer's part, on every rank. Raises ``ConfigError`` if ``device`` cannot send."""
        raise NotImplementedError
