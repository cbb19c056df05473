"""Wheels for a machine with a GPU and without a package registry.

    python -m pip freeze > IMAGE.txt                     on that machine
    python -m bench.gpu --prepare IMAGE.txt              here: fills gpu-wheels/
    copy the repository and gpu-wheels/ there, at most 64 MiB together, and in the repository:
    python -m pip install --no-index --no-deps --target .site gpu-wheels/*.whl
    PYTHONPATH=.site python -m bench.gpu --out results
    python -m bench --record gpu --results results/results.json     here again

The wheels are those of ``prime-rl`` and of each library that it needs and the image lacks, or has
in a version outside of the range that ours declare: in the version of ``constraints.txt``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MOST = 64 * 2**20
"""Bytes of the repository's files and the wheels."""
SYSTEMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]
PLATFORMS = [*SYSTEMS, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
"""Newest first."""


def prepare(image: Path, python: str, folder: Path) -> int:
    """Fill ``folder``; 0, or 1 if it is too large. ``python``: "3.12"."""
    ours = our_packages()
    needed, lacking = closure(
        "prime-rl",
        ours=ours,
        image=pins(image.read_text("utf-8")),
        constraints=pins((ROOT / "constraints.txt").read_text("utf-8")),
        python=python,
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if lacking:
        download([f"{name}=={version}" for name, version in lacking.items()], python, folder)
    for name in needed:
        command = ["build", "--quiet", "--wheel", "--no-isolation", "--outdir", str(folder)]
        subprocess.run(
            [sys.executable, "-m", *command, str(ours[name])], check=True, stdout=subprocess.DEVNULL
        )

    return report(folder, num_ours=len(needed))


def report(folder: Path, num_ours: int) -> int:
    """Print what came of it: 1 if it is too large to be carried."""
    wheels = sorted(folder.glob("*.whl"), key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in wheels)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = (ROOT / name.decode() for name in listed.stdout.split(b"\0") if name)
    tree = sum(path.stat().st_size for path in paths if path.is_file())
    print(
        f"{folder}: {len(wheels) - num_ours} libraries and {num_ours} packages of ours, "
        f"{size / 2**20:.1f} MiB; the repository {tree / 2**20:.1f} MiB"
    )
    if size + tree <= MOST:
        return 0
    largest = ", ".join(f"{each.name} {each.stat().st_size / 2**20:.1f}" for each in wheels[:3])
    print(
        f"together more than {MOST >> 20} MiB. The largest: {largest} MiB. Take an image that has "
        "them",
        file=sys.stderr,
    )
    return 1


def closure(
    root: str,
    ours: Iterable[str],
    image: Mapping[str, str],
    constraints: Mapping[str, str],
    python: str,
) -> tuple[list[str], dict[str, str]]:
    """Our packages that ``root`` needs, itself included, and the libraries that the image lacks,
    with their versions. Reads the metadata of what is installed here. Raises ``SystemExit`` for a
    library that is neither installed here nor in the constraints."""
    ours = {*ours}
    environment: dict[str, Any] = {**default_environment(), "python_version": python}
    environment["python_full_version"] = f"{python}.0"
    needed: list[str] = []
    lacking: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        has = image.get(name)
        is_there = has is not None and requirement.specifier.contains(has, prereleases=True)
        if name not in ours and (is_there or (key in seen and name in lacking)):
            continue
        if key in seen:
            continue
        seen.add(key)
        if name in ours:
            needed += [name] * (name not in needed)
        elif name not in constraints:
            raise SystemExit(
                f"{name}: needed, not in the image, and without a version in constraints.txt. "
                "Add it there"
            )
        else:
            lacking[name] = constraints[name]

        try:
            required = requires(name) or ()
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here: run make setup") from None
        for text in required:
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(
                child.marker.evaluate({**environment, "extra": extra}) for extra in extras
            ):
                waiting.append(child)

    return needed, lacking


def download(requirements: list[str], python: str, folder: Path) -> None:
    """The wheels of these, for Linux on x86-64."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *requirements], check=True)


def pins(text: str) -> dict[str, str]:
    """Version by name of each line ``name==version``. Local versions (``+cu130``) and lines of
    other kinds are left out."""
    versions: dict[str, str] = {}
    for line in text.splitlines():
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                versions[canonicalize_name(requirement.name)] = specifier.version
    return versions


def our_packages() -> dict[str, Path]:
    """The folder of each distribution of this repository by its name."""
    names: dict[str, Path] = {}
    for pattern in ("", "app/", "contract/", "core/", "plugins/*/", "prime_rl_*/"):
        for path in ROOT.glob(f"{pattern}pyproject.toml"):
            project = tomllib.loads(path.read_text("utf-8"))["project"]
            names[canonicalize_name(project["name"])] = path.parent
    return names
