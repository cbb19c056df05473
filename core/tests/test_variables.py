"""Engines, trainer and workers inherit settings of libraries, and no key of the user."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.variables import for_programs, for_workers, inherited

KEYS = [
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "WANDB_API_KEY", "OPENAI_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "GITHUB_TOKEN"),
    *("PRIME_RL_ADMIN_KEY", "PRIME_RL_ENGINE_API_KEY", "VLLM_API_KEY", "NVIDIA_API_KEY"),
    *(
        "MY_PASSWORD",
        "DATABASE_URL",
        "SLURM_JWT",
        "RAY_AUTH_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    *("SSH_AUTH_SOCK", "JUDGE_KEY", "hf_token", "NCCL_SECRET", "TORCH_APIKEY", "SENTRY_DSN"),
]
SETTINGS = [
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "HTTPS_PROXY"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("VLLM_ATTENTION_BACKEND", "VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE_CHUNK", "FLASHINFER_JIT"),
    *("OMP_NUM_THREADS", "KMP_AFFINITY", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "PRIME_RL_CACHE", "PRIME_RL_DISABLE"),
]


def test_settings_are_inherited_and_keys_are_not():
    environ = dict.fromkeys([*KEYS, *SETTINGS], "x")
    assert sorted(inherited((), environ)) == sorted(SETTINGS)


def test_what_the_config_names_is_inherited_too_and_none_means_all():
    environ = dict.fromkeys([*KEYS, *SETTINGS], "x")
    named = inherited(("JUDGE_KEY", "absent"), environ)
    assert sorted(named) == sorted([*SETTINGS, "JUDGE_KEY"])
    assert inherited(None, environ) == environ


@given(st.dictionaries(st.text("ABCDEFHKNOTYR_", max_size=12), st.just("x")))
def test_programs_get_least_and_engines_most(environ):
    programs, workers, engines = (
        f(environ=environ) for f in (for_programs, for_workers, inherited)
    )
    assert programs.items() <= workers.items() <= engines.items() <= environ.items()


@pytest.mark.parametrize("word", ["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS", "API_KEY"])
@pytest.mark.parametrize("library", ["HF", "VLLM", "NCCL", "PRIME_RL", "RAY", "TORCH"])
def test_a_key_of_a_library_is_no_setting_of_it(word, library):
    for name in (f"{library}_{word}", f"{library}_MY_{word}", f"{library}_{word}_2"):
        assert inherited((), {name: "x", name.lower(): "x"}) == {}
