"""Names that ``prime-rl plugins new`` refuses because they are taken."""

import pytest
from installed_plugins import install as install

from prime_rl import ConfigError
from prime_rl_devkit.scaffold.names import names_for


def test_the_name_of_an_installed_plugin_is_taken(install):
    install(plugin="taken", distribution="prime-rl-else", version="2.0")
    with pytest.raises(ConfigError) as caught:
        names_for("taken", "monitor")
    assert str(caught.value) == (
        "name: 'taken' is taken by the plugin 'taken' (prime-rl-else 2.0). Choose another name, "
        "or uninstall that one."
    )


def test_what_an_installed_plugin_offers_is_taken_for_its_kind_only(install):
    source = """
    class F(Filter):
        name = "odd"

        @hookimpl
        def filter_rollout(self, rollout):
            return None

    @hookimpl
    def register_filters():
        return [F]
    """
    install(source, plugin="other")
    with pytest.raises(ConfigError, match="'odd' is taken by a filter of the plugin 'other'"):
        names_for("odd", "filter")
    assert names_for("odd", "monitor").name == "odd"


def test_a_module_of_that_name_is_taken(install):
    module = install(distribution="prime-rl-hidden", plugin="quite-another")
    assert module == "prime_rl_hidden"
    with pytest.raises(ConfigError, match="'hidden' is taken by"):
        names_for("hidden", "algorithm")
