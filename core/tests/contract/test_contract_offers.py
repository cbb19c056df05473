"""From a name in the TOML to a class, or to a message that says what to install."""

import pytest
from pydantic import PositiveFloat

from prime_rl import Algorithm, ConfigError, PluginConfig
from prime_rl.registry.manager import Origin
from prime_rl.registry.offers import ALGORITHM, KINDS, LAUNCHER, Offered, select, settings_of


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
        "prime-rl-new-idea, if there is one)."
    )


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "k8s"])
def test_a_scheduler_is_no_launcher_and_no_package_is_guessed(name):
    with pytest.raises(ConfigError, match="starts a Ray cluster") as caught:
        select(LAUNCHER, name, {}, "launcher")
    assert "docs/multi-node.md" in str(caught.value)
    assert "prime-rl-" not in str(caught.value)


def test_an_index_of_known_packages_overrides_the_convention(install):
    install(group="prime_rl.known", plugin="algorithm.opd_x", value="prime_rl_distill_x")
    assert message("opd_x", {}).endswith(
        "(installed: none). Install the package that brings it: pip install prime-rl-distill-x"
    )


def test_a_name_of_an_installed_package_that_is_disabled_is_not_called_misspelt(
    install, monkeypatch
):
    install(group="prime_rl.known", plugin="algorithm.rlo", value="prime_rl_distill_x")
    assert "Install the package that brings it: pip install prime-rl-distill-x" in message("rlo")
    versions = {"prime-rl-distill-x": "1.0"}
    monkeypatch.setattr("prime_rl.registry.offers.installed_versions", lambda: versions)
    assert message("rlo").endswith(
        "prime-rl-distill-x is installed and brings it, but is disabled: see plugins.disabled and "
        "--without."
    )


def test_an_index_entry_counts_for_its_kind_only(install):
    install(group="prime_rl.known", plugin="filter.opd_x", value="prime_rl_distill_x")
    assert message("opd_x", {}).endswith("(by convention prime-rl-opd-x, if there is one).")


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


def test_every_kind_has_a_hook_of_its_own_but_the_three_sorts_of_run_observers():
    """One hook for ``Observer``, ``Monitor`` and ``TrainerObserver``."""
    assert len(KINDS) == 18
    assert len({kind.hook for kind in KINDS}) == 16
    shared = [kind.base.__name__ for kind in KINDS if kind.hook == "register_observers"]
    assert shared == ["Monitor", "Observer", "TrainerObserver"]
    assert [kind.plural for kind in KINDS if kind.name == "loss"] == ["losses"]


def test_every_registration_hook_has_a_kind():
    from prime_rl.registry.checks import SPECS

    registering = {name for name in SPECS if name.startswith("register_")}
    by_kind = {name for kind in KINDS for name in kind.registration_hooks}
    assert by_kind == registering - {"register_commands"}
