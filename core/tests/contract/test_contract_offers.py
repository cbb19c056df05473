"""From a name in the TOML to a class, or to a message that says what to install."""

from pathlib import Path

import pytest
from pydantic import PositiveFloat

from prime_rl import Algorithm, ConfigError, PluginConfig
from prime_rl.registry.manager import Origin
from prime_rl.registry.offers import ALGORITHM, KINDS, Offered, select, settings_of


class RlooConfig(PluginConfig):
    alpha: float = 0.5
    strict: bool = True


class Rloo(Algorithm):
    name = "rloo"
    config_class = RlooConfig


OFFERS = {"rloo": Offered(Rloo, Origin("rloo", "prime-rl-rloo", "1.0"))}


def message(name, offers=OFFERS):
    with pytest.raises(ConfigError) as caught:
        select(ALGORITHM, name, offers, "env 'a': algo")
    return str(caught.value)


def test_a_known_name_gives_its_class():
    assert select(ALGORITHM, "rloo", OFFERS, "") is Rloo


def test_a_close_name_is_suggested():
    assert message("rlo") == (
        "env 'a': algo: no installed plugin offers the algorithm 'rlo' (installed: rloo). "
        "Did you mean 'rloo'?"
    )


def test_an_unknown_name_gives_the_package_by_convention():
    assert message("new_idea", {}) == (
        "env 'a': algo: no installed plugin offers the algorithm 'new_idea' (installed: none). "
        "Check the spelling, or install the package that brings it (by convention "
        "prime-rl-new-idea)."
    )


def test_an_index_of_known_packages_overrides_the_convention(install):
    install(group="prime_rl.known", plugin="algorithm.opd_x", value="prime_rl_distill_x")
    assert message("opd_x", {}).endswith(
        "(installed: none). Install the package that brings it: pip install prime-rl-distill-x"
    )


def test_an_index_entry_counts_for_its_kind_only(install):
    install(group="prime_rl.known", plugin="filter.opd_x", value="prime_rl_distill_x")
    assert message("opd_x", {}).endswith("(by convention prime-rl-opd-x).")


def test_settings_become_the_plugins_own_config():
    config = settings_of(Rloo, ALGORITHM, {"alpha": 0.25}, "algo")
    assert config == RlooConfig(alpha=0.25, strict=True)


def test_a_default_is_validated_too():
    class Config(PluginConfig):
        limit: PositiveFloat = -1.0

    class Bad(Algorithm):
        name = "bad"
        config_class = Config

    with pytest.raises(ConfigError, match=r"algo .*limit: Input should be greater than 0"):
        settings_of(Bad, ALGORITHM, {}, "algo")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"alhpa": 1}, "algo (algorithm 'rloo').alhpa: unknown key; did you mean 'alpha'?"),
        ({"zz": 1}, "algo (algorithm 'rloo').zz: unknown key; known here: alpha, strict"),
        (
            {"alpha": "much"},
            "algo (algorithm 'rloo').alpha: Input should be a valid number, unable to parse string "
            "as a number (got 'much')",
        ),
    ],
)
def test_settings_the_plugin_does_not_take(settings, expected):
    with pytest.raises(ConfigError) as caught:
        settings_of(Rloo, ALGORITHM, settings, "algo")
    assert str(caught.value) == expected


def test_a_plugins_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RlooConfig().alpha = 1.0  # type: ignore[misc]


def test_offers_compare_by_identity():
    assert Rloo(RlooConfig()) != Rloo(RlooConfig())


def test_every_kind_has_a_hook_of_its_own():
    assert len({kind.hook for kind in KINDS}) == len(KINDS) == 18
    assert [kind.plural for kind in KINDS if kind.name == "loss"] == ["losses"]


def test_every_registration_hook_has_a_kind():
    from prime_rl.registry.checks import SPECS

    registering = {name for name in SPECS if name.startswith("register_")}
    assert {kind.hook for kind in KINDS} == registering - {"register_commands"}


def test_the_contract_is_torch_free(tmp_path):
    import os
    import subprocess
    import sys

    code = (
        "import sys, prime_rl, prime_rl.testing, prime_rl_app.cli.app, prime_rl_app.resolve\n"
        "from prime_rl.registry.manager import GROUPS, load_plugins\n"
        "from prime_rl.registry.offers import KINDS, collect\n"
        "assert [collect(load_plugins(g), kind) for g in GROUPS for kind in KINDS]\n"
        "heavy = {'torch', 'transformers', 'verifiers', 'renderers', 'matplotlib', 'zmq'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if Path(p).is_dir())}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=tmp_path)
