"""What a run loads, as ``plugins.json`` has it."""

import json

from prime_rl.registry.manager import load_plugins
from prime_rl_tools.versions import write_versions


def test_the_versions_of_both_sides(tmp_path):
    hooks = load_plugins(disabled=["wandb"])
    write_versions(tmp_path, hooks, disabled=["losses"])
    found = json.loads((tmp_path / "plugins.json").read_text())
    rows = {(row["group"], row["plugin"]): row for row in found["plugins"]}
    assert rows["prime_rl", "app"]["distribution"] == "prime-rl-app"
    assert rows["prime_rl", "app"]["version"] == found["packages"]["prime-rl-app"]
    assert ("prime_rl", "wandb") not in rows and ("prime_rl.trainer", "losses") not in rows
    assert any(group == "prime_rl.trainer" for group, _ in rows)
