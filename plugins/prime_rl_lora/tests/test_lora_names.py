"""``[trainer.lora]`` names modules: a dry run knows from the model's files if they are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

from prime_rl import ConfigError, WeightsError
from prime_rl.config.run import RunConfig
from prime_rl_app.resolve import Resolved, check_tuning

SHAPES = {
    "model.embed_tokens.weight": [61, 8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.q_proj.bias": [8],
    "model.layers.0.mlp.up_proj.weight": [16, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [61, 8],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two files that are nothing but headers."""
    (tmp_path / "config.json").write_text("{}")
    names = list(SHAPES)
    for number, part in enumerate((names[:3], names[3:]), 1):
        entry = {"dtype": "F32", "data_offsets": [0, 0]}
        header = json.dumps({n: entry | {"shape": SHAPES[n]} for n in part}).encode()
        path = tmp_path / f"model-{number:05}-of-00002.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    return tmp_path


def config(folder: Path, **lora: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"name": str(folder)}, "max_steps": 1, "trainer": {"lora": lora}}
    )


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": ["q_proj", "mlp.up_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "head", "mlp"]},
    ],
)
def test_names_that_are_there_pass(folder: Path, lora: dict[str, Any]) -> None:
    check_tuning(Resolved(config(folder, **lora)))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"target_modules": ["q_proj", "up_prj"]},
            "target_modules: no module of the model in {} is called 'up_prj'. Did you mean "
            "'up_proj'? There are embed_tokens, lm_head, q_proj, up_proj.",
        ),
        (
            {"target_modules": ["j"]},
            "target_modules: no module of the model in {} is called 'j'. "
            "There are embed_tokens, lm_head, q_proj, up_proj.",
        ),
        ({"target_modules": ["norm"]}, "target_modules: no module of the model in {} is called"),
        ({"modules_to_save": ["score"]}, "modules_to_save: no module of the model in {} is called"),
    ],
)
def test_names_that_are_not_there_are_refused(
    folder: Path, lora: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tuning(Resolved(config(folder, **lora)))
    assert str(caught.value).startswith(f"trainer.lora.{said.format(folder)}")


def test_a_model_that_is_not_here_yet_is_left_to_the_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path / "cache"))
    check_tuning(Resolved(config(Path("owner/name"), target_modules=["absent"])))
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    check_tuning(Resolved(config(folder, target_modules=["absent"])))


def test_a_file_that_git_lfs_has_not_fetched_is_named(folder: Path) -> None:
    pointer = folder / "model-00001-of-00002.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightsError, match=f"{pointer}: can't be read: .*git-lfs"):
        check_tuning(Resolved(config(folder, target_modules=["q_proj"])))


def test_no_torch_is_imported_for_it(folder: Path) -> None:
    code = (
        "import sys\n"
        "from prime_rl.config.run import RunConfig\n"
        "from prime_rl_app.resolve import Resolved, check_tuning\n"
        "check_tuning(Resolved(RunConfig.model_validate_json(sys.argv[1])))\n"
        "assert not {'torch', 'safetensors', 'transformers'} & sys.modules.keys()\n"
    )
    text = config(folder, target_modules=["q_proj"]).model_dump_json()
    subprocess.run([sys.executable, "-c", code, text], check=True, timeout=LIMIT)
