"""From the table to vLLM's command line, without vLLM."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prime_rl import ConfigError, ConfigWarning, EngineLaunch
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import ENGINE, collect, settings_of
from prime_rl_vllm import Vllm, VllmConfig
from prime_rl_vllm.arguments import NOT_SPLIT, OWNED, coarse_parts, to_flags, with_defaults
from prime_rl_vllm.cpu_start import cpu_settings
from prime_rl_vllm.server import parse

LAUNCH = EngineLaunch(
    model_path=Path("folder/model"),
    served_model_name="owner/name",
    host="127.0.0.1",
    port=4321,
    max_model_len=64,
    seed=7,
    admin_key="secret",
    status_path=Path("status.json"),
    policy_version=3,
    wait_for_model=True,
)


def config(**arguments):
    return settings_of(Vllm, ENGINE, arguments, "inference.vllm")


def parser():
    """The kinds of arguments that vLLM's parser has."""
    made = argparse.ArgumentParser()
    made.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--enable-sleep-mode", action="store_true")
    made.add_argument("--cudagraph-capture-sizes", nargs="+", type=int)
    made.add_argument("--allowed-origins", type=json.loads)
    made.add_argument("--compilation-config", type=json.loads)
    made.add_argument("--gpu-memory-utilization", type=float)
    made.add_argument("--dtype")
    return made


def parsed(**arguments):
    return vars(parser().parse_args(to_flags(arguments, parser())))


def test_each_kind_of_argument_keeps_its_value():
    given = {
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "cudagraph_capture_sizes": [1, 2, 4],
        "allowed_origins": ["a", "b"],
        "compilation_config": {"level": 0, "backend": "eager"},
        "gpu_memory_utilization": 0.5,
        "dtype": "-odd",
    }
    assert parsed(**given) == given


def test_a_switch_that_is_off_by_itself_stays_off():
    assert parsed(enable_sleep_mode=False)["enable_sleep_mode"] is False


def test_a_switch_takes_no_number():
    with pytest.raises(ConfigError, match=r"inference\.vllm\.enforce_eager: is 1, expected true"):
        to_flags({"enforce_eager": 1}, parser())


def test_an_argument_that_vllm_does_not_have_is_refused_with_a_guess():
    with pytest.raises(ConfigError, match=r"no such argument\. Did you mean enforce_eager"):
        to_flags({"enforce_eagre": True}, parser())


@pytest.mark.parametrize("key", OWNED)
def test_keys_that_prime_rl_sets_are_refused_with_the_reason(key):
    with pytest.raises(ConfigError) as caught:
        config(**{key: "x"})
    assert f"inference.vllm.{key}: cannot be set here: {OWNED[key]}" in str(caught.value)


def test_keys_need_underscores_and_no_negation():
    with pytest.raises(ConfigError, match="underscores: enforce_eager"):
        config(**{"enforce-eager": True})
    with pytest.raises(ConfigError, match="write enforce_eager = false"):
        config(no_enforce_eager=True)


def test_dtype_must_be_a_string():
    with pytest.raises(ConfigError, match="dtype"):
        config(dtype=32)


def test_a_run_of_any_seed_gives_vllm_one_that_numpy_takes():
    command = Vllm(config()).command(replace(LAUNCH, seed=2**40 + 5))
    assert parse(command.argv[4:]).seed == 5


def test_the_server_parses_the_command_of_the_engine():
    command = Vllm(config(dtype="float32", compilation_config={"level": 0})).command(LAUNCH)
    assert command.argv[:4] == [sys.executable, "-P", "-m", "prime_rl_vllm.server"]
    args = parse(command.argv[4:])
    assert args.settings.arguments == {"dtype": "float32", "compilation_config": {"level": 0}}
    assert (args.model, args.served_model_name) == (Path("folder/model"), "owner/name")
    assert (args.host, args.port, args.max_model_len, args.seed) == ("127.0.0.1", 4321, 64, 7)
    assert (args.policy_version, args.wait_for_model) == (3, True)
    assert args.status_path == Path("status.json") and not args.can_sleep


def test_the_admin_key_is_not_on_the_command_line():
    command = Vllm(VllmConfig()).command(LAUNCH)
    assert "secret" not in " ".join(command.argv)
    assert command.env["PRIME_RL_ADMIN_KEY"] == "secret"


def test_the_server_runs_under_the_configured_interpreter():
    from dataclasses import replace

    launch = replace(LAUNCH, python=Path("/there/bin/python"), can_sleep=True)
    argv = Vllm(VllmConfig()).command(launch).argv
    assert argv[0] == "/there/bin/python" and "--can-sleep" in argv


def test_num_gpus_is_the_product_of_all_parallelism():
    assert Vllm(VllmConfig()).num_gpus == 1
    assert Vllm(config(tensor_parallel_size=4, pipeline_parallel_size=2)).num_gpus == 8


def test_the_dtype_has_torchs_name_unless_it_is_auto():
    told = {name: Vllm(config(dtype=name)).dtype for name in ("auto", "half", "bfloat16")}
    assert told == {"auto": None, "half": "float16", "bfloat16": "bfloat16"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"head_dtype": "float32"}),
        ({"rope_theta": 5.0}, {"head_dtype": "float32", "rope_theta": 5.0}),
        ('{"rope_theta": 5.0}', {"head_dtype": "float32", "rope_theta": 5.0}),
        ({"head_dtype": "model"}, {"head_dtype": "model"}),
    ],
)
def test_logits_are_float32_unless_the_user_says_otherwise(given, expected):
    arguments = {"hf_overrides": given} if given else {}
    made = with_defaults(config(**arguments).arguments)
    assert made["hf_overrides"] == expected
    assert made["generation_config"] == "vllm"


@pytest.mark.parametrize("given", ["{", "[1]", 3])
def test_overrides_of_another_form_are_refused(given):
    with pytest.raises(ConfigError, match=r"inference\.vllm\.hf_overrides: is"):
        with_defaults({"hf_overrides": given})


def test_logits_in_float32_save_the_mismatch_of_rounded_ones():
    """Hidden states and head in bfloat16, as on a GPU; the trainer's logits are float32."""
    torch.manual_seed(0)
    hidden = torch.randn(256, 512).bfloat16()
    head = (torch.randn(4096, 512) * 0.2).bfloat16()
    exact = hidden.float() @ head.float().T
    trainer = exact.log_softmax(-1)
    tokens = torch.multinomial(trainer.exp(), 1)

    def mismatch(logits):
        log_ratio = (trainer - logits.log_softmax(-1)).gather(1, tokens)
        k3 = (log_ratio.exp() - 1 - log_ratio).mean().item()
        return k3, log_ratio.std().item()

    rounded_k3, rounded_std = mismatch(exact.bfloat16().float())
    float32_k3, float32_std = mismatch((hidden.double() @ head.double().T).float())
    assert 1e-4 < rounded_k3 < 5e-4 and 0.01 < rounded_std < 0.04
    assert abs(float32_k3) < 1e-7 and float32_std < 1e-5


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16", "mamba_cache_dtype": "float32", "lora_dtype": "auto"},
        {"hf_overrides": {"head_dtype": "float32"}, "max_num_seqs": 4},
        {"enable_mamba_cache_stochastic_rounding": False, "logits_processors": []},
    ],
)
def test_settings_that_leave_the_distribution_alone_say_nothing(arguments):
    assert coarse_parts(arguments) == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("kv_cache_dtype", "fp8_e5m2", "keys and values are rounded"),
        ("quantization", "fp8", "weights are rounded"),
        ("quantization_config", {"linear": "fp8"}, "weights are rounded"),
        ("mamba_cache_dtype", "float16", "the states of recurrent layers are rounded"),
        ("enable_mamba_cache_stochastic_rounding", True, "the states of recurrent"),
        ("lora_dtype", "bfloat16", "the adapter is rounded"),
        ("logits_processors", ["a.b:C"], "logits are changed"),
        ("hf_overrides", {"num_experts_per_tok": 2}, "is another one than the trainer's"),
        ("hf_overrides", {"head_dtype": "model"}, "is another one than the trainer's"),
    ],
)
def test_settings_that_change_the_distribution_say_what_they_do(name, value, why):
    (note,) = coarse_parts({name: value, "max_num_seqs": 4})
    assert note.startswith(f"{name} is {value!r}, so ") and why in note and "mismatch_kl" in note


def test_each_setting_that_does_so_is_noted_by_itself():
    assert len(coarse_parts({"kv_cache_dtype": "fp8", "quantization": "fp8"})) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "awq"}, r"inference\.vllm\.quantization: is 'awq'; a run"),
        ({"quantization_config": {"linear": "fp8"}}, r"quantization_config: is \{'linear'"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
            r"hf_overrides\.quantization_config: is \{'quant_method'",
        ),
        ({"load_format": "dummy"}, "load_format: is 'dummy'; the first rollouts"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}},
            "kv_transfer_config: keys and values would come from another server or a store",
        ),
        (
            {"kv_offloading_size": 8, "kv_offloading_backend": "lmcache"},
            "kv_offloading_backend: keys and values would come from another server or a store",
        ),
        ({"watermark_config": {"key": 5}}, "watermark_config: tokens would be chosen by a key"),
    ],
)
def test_an_engine_of_a_run_samples_the_policy_that_is_trained(arguments, message):
    from dataclasses import replace

    engine = Vllm(config(**arguments))
    with pytest.raises(ConfigError, match=message):
        engine.check(None)  # so --dry-run refuses it too
    assert engine.command(LAUNCH).argv  # frozen
    with pytest.raises(ConfigError, match=message):
        engine.command(replace(LAUNCH, weights_roots=[Path("run")]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, r"inference\.vllm\.pipeline_parallel_size: is 2, and vLLM"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching: is false, and vLLM records"),
    ],
)
def test_what_vllm_cannot_record_routes_with_is_refused_before_it_starts(arguments, message):
    from dataclasses import replace

    engine = Vllm(config(**arguments))
    assert engine.command(LAUNCH).argv
    with pytest.raises(ConfigError, match=message):
        engine.command(replace(LAUNCH, records_routes=True))


@pytest.mark.parametrize("backend", [{}, {"kv_offloading_backend": "native"}])
def test_keys_and_values_in_the_engines_own_host_memory_may_be_a_runs(backend):
    """vLLM finds them by the salted hashes of its prefix cache, and they end with the process."""
    from dataclasses import replace

    engine = Vllm(config(kv_offloading_size=8, **backend))
    command = engine.command(replace(LAUNCH, weights_roots=[Path("run")]))
    assert parse(command.argv[4:]).settings.arguments["kv_offloading_size"] == 8


def test_weights_that_vllm_rounds_anew_at_every_update_may_be_a_runs():
    """``quantization = "fp8"`` over a folder in full precision; the dry run notes what it costs."""
    from dataclasses import replace

    engine = Vllm(config(quantization="fp8"))
    command = engine.command(replace(LAUNCH, weights_roots=[Path("run")]))
    assert parse(command.argv[4:]).settings.arguments["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"hf_overrides": {"head_dtype": "model"}}, "hf_overrides"),
        ({"logits_processors": ["mine:Ban"]}, "logits_processors"),
    ],
)
def test_a_run_warns_before_it_starts_that_the_distributions_differ(monkeypatch, arguments, name):
    monkeypatch.setattr("prime_rl_vllm.check_interpreter", lambda python: None)
    with pytest.warns(ConfigWarning, match=rf"inference\.vllm\.{name} is .*differs") as caught:
        Vllm(config(**arguments)).check(None)
    assert len(caught) == 1


def test_chunked_prefill_is_refused_on_a_cpu():
    assert cpu_settings({"dtype": "float32"}) == {
        "enable_chunked_prefill": False,
        "dtype": "float32",
    }
    with pytest.raises(
        ConfigError, match="enable_chunked_prefill: is True; on a CPU vLLM then dies"
    ):
        cpu_settings({"enable_chunked_prefill": True})


def test_each_prefill_engine_takes_as_many_gpus_as_the_one_that_samples():
    assert Vllm(config(tensor_parallel_size=2, prefill_engines=2)).num_gpus == 6
    command = Vllm(config(prefill_engines=2)).command(LAUNCH)
    settings = parse(command.argv[4:]).settings
    assert settings.prefill_engines == 2 and "prefill_engines" not in settings.arguments


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_what_does_not_go_together_with_prefill_engines_is_refused(name):
    values = {"kv_transfer_config": {"kv_connector": "X"}, "distributed_executor_backend": "ray"}
    value = values.get(name, 2)
    with pytest.raises(ConfigError) as caught:
        config(prefill_engines=1, **{name: value})
    refusal = f"inference.vllm.{name}: is {value!r}, and prefill_engines is 1: {NOT_SPLIT[name]}"
    assert refusal in str(caught.value)
    assert config(prefill_engines=0, **{name: value}).arguments[name] == value


def test_one_stage_and_processes_of_vllm_go_together_with_prefill_engines():
    usual = {"pipeline_parallel_size": 1, "distributed_executor_backend": "mp"}
    assert usual.items() <= config(prefill_engines=1, **usual).arguments.items()


def test_prefill_engines_share_no_gpu_with_the_trainer_and_record_no_routes():
    from dataclasses import replace

    engine = Vllm(config(prefill_engines=1, data_parallel_size=1))
    assert "sleep" in engine.lacks and "sleep" not in Vllm(config()).lacks
    with pytest.raises(ConfigError, match=r"prefill_engines: .* with deployment\.colocated"):
        engine.command(replace(LAUNCH, can_sleep=True))
    with pytest.raises(ConfigError, match="enable_return_routed_experts: is True, and prefill_"):
        engine.command(replace(LAUNCH, records_routes=True))


@pytest.mark.parametrize(
    ("settings", "tables", "reason"),
    [
        ({"prefill_engines": 1}, {"deployment": {"colocated": True}}, "prefill_engines: the eng"),
        ({"prefill_engines": 1}, {"trainer": {"router_replay": True}}, "enable_return_routed_exp"),
        ({"pipeline_parallel_size": 2}, {"trainer": {"router_replay": True}}, "pipeline_parallel"),
    ],
)
def test_what_the_run_asks_of_the_engine_is_checked_before_a_start(
    monkeypatch, settings, tables, reason
):
    from prime_rl_app.config import build_config
    from prime_rl_app.resolve import Resolved, check_engine

    for name in ("check_interpreter", "check_nixl"):
        monkeypatch.setattr(f"prime_rl_vllm.{name}", lambda python: None)
    least = {"model": {"name": "owner/model"}, "max_steps": 1}
    inference = {"inference": {"engine": "vllm", "vllm": settings}}
    check_engine(Resolved(build_config(least | inference)))
    with pytest.raises(ConfigError, match=rf"inference\.vllm\.{reason}"):
        check_engine(Resolved(build_config(least | inference | tables)))


def test_the_plugin_registers_the_engine():
    assert collect(load_plugins(), ENGINE)["vllm"].cls is Vllm
