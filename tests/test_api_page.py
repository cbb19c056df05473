"""`docs/api.md` has every public class, and the index of plugins is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.docs.api_page import api_page, exceptions, public_classes

import prime_rl
from prime_rl import ConfigError
from prime_rl.registry.manager import contract_of
from prime_rl_devkit.facts import installed
from prime_rl_devkit.index import read_index, search

ROOT = Path(__file__).parents[1]
TABLE = """
[[plugin]]
distribution = "rl-of-mine"
summary = "Credit by the length of the reply"
source = "https://example.org/rl-of-mine"
contract = ">=2,<4"
offers = ["algorithm.mine", "command.mine"]
"""


def test_every_class_that_prime_rl_exports_is_on_the_page():
    page = api_page()
    exported = {getattr(prime_rl, name) for name in prime_rl._MODULES if name != "Run"}
    ours = {
        each
        for each in exported
        if isinstance(each, type) and each.__module__.startswith("prime_rl")
    }
    assert ours <= {*public_classes(), *exceptions()}
    for cls in public_classes():
        assert f"\n## `{cls.__name__}`\n" in page
        assert cls.__doc__, cls


@pytest.mark.parametrize(
    "line",
    [
        "| `scope` | `Scope` | `'sequence'` | The rollouts or samples that one call sees whole.",
        "| `__call__` | `(inputs: LossInputs) -> LossOutputs` | Sum the loss over",
        "| `temperature` | `float` | `1.0` | ",
        "| `prepare` | `(inputs: HeadInputs) -> Mapping[str, Values]` |",
        "| `StreamError` | `PrimeRLError` | A per-token stream has the wrong length",
        "| `rewards` | `dict[str, float]` | `{}` |",
    ],
)
def test_the_page_has_types_defaults_and_what_a_field_means(line):
    assert line in api_page()


def test_the_index_says_of_our_packages_what_they_offer():
    offered: dict[str, set[str]] = {}
    for plugin in installed():
        names = {f"{kind.name}.{each.cls.name}" for kind, each in plugin.offers}
        offered.setdefault(plugin.source.distribution, set()).update(names)
        assert contract_of(plugin.entry, object()) in (2, ">=2,<3")
    listed = {each.distribution: {*each.offers} for each in read_index() if each.is_ours}
    assert listed == {name: offers for name, offers in offered.items() if offers}


def test_each_package_of_the_index_says_where_its_source_is():
    for package in read_index():
        if package.is_ours:
            assert (ROOT / package.source / "pyproject.toml").is_file()


def test_a_package_of_a_third_party_is_read():
    (package,) = read_index(TABLE)
    assert (package.distribution, package.is_ours, package.installed) == ("rl-of-mine", False, "")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"rl-of-mine"', '"RL of mine!"', "RL of mine!: distribution"),
        ('"Credit by the length of the reply"', '""', "rl-of-mine: summary"),
        (">=2,<4", "2", "rl-of-mine: contract"),
        ('"algorithm.mine"', '"mine"', "offers has 'mine', expected KIND.NAME"),
        ('"algorithm.mine"', '"algo.mine"', "offers has 'algo.mine', expected KIND.NAME"),
        ("offers", "offer", "rl-of-mine: offer"),
        ("[[plugin]]", TABLE + "[[plugin]]", "rl-of-mine has two tables"),
        ("summary", "summary = ", "index.toml: "),
    ],
)
def test_a_table_that_is_wrong_is_named(old, new, says):
    with pytest.raises(ConfigError, match=r"index\.toml") as caught:
        read_index(TABLE.replace(old, new))
    assert says in str(caught.value)


def test_a_search_finds_words_of_names_summaries_and_offers():
    assert [each.distribution for each in search(["vineppo"])] == ["prime-rl-credit"]
    assert "prime-rl-ppo" in [each.distribution for each in search(["critic"])]
    assert "prime-rl-baselines" in [each.distribution for each in search(["whiten"])]
    assert len(search([])) == len(read_index())
    with pytest.raises(ConfigError, match="Did you mean 'vineppo'"):
        search(["vinepo"])
