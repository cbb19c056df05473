"""Tunings: which weights of the policy train. Entry-point group ``prime_rl.trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    from torch import Tensor, nn


class Tuning(Offer):
    """Chooses the weights that train, and publishes them as files: an adapter beside the model, or
    the model. The table ``[trainer.<name>]`` selects it; without one all weights train. Keep
    ``import torch`` inside the methods."""

    weights_file: ClassVar[str]
    """The safetensors file of a published version. ``model.safetensors`` is a whole model, which a
    resumed run loads as such; any other name an adapter."""

    def check(self, model_dir: Path) -> None:
        """Before any process starts: raises ``ConfigError`` if the settings do not fit the model,
        whose folder may not be there yet."""

    def prepare(self, model: nn.Module, model_dir: Path, adapter: Path | None) -> None:
        """Freeze weights, and add an adapter, in place: a new one, or that of the folder
        ``adapter`` where a run resumes. ``model`` is a transformers model, not sharded yet. Raises
        ``ConfigError``."""
        raise NotImplementedError

    def initial(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Within it the prepared ``model`` computes as before any training. None: the trainer has
        to keep a copy of the first weights, which the model's folder has under the same names."""

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors to publish, by name, as this rank holds them."""
        raise NotImplementedError

    def metadata(self) -> Mapping[str, str]:
        """Of ``weights_file``."""
        return {}

    def write_config(self, directory: Path) -> None:
        """Write the files of a published version besides its tensors. Rank 0 calls this."""

    def merge(self, model_dir: Path, adapter: Path, directory: Path) -> None:
        """Write the weights of the export into ``directory``: the model of ``model_dir`` with the
        published ``adapter``, in float32. Rank 0 calls this. Raises ``WeightsError``."""
        raise NotImplementedError
