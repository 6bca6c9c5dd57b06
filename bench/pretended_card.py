"""Runs a command on a card that is not there: every branch for CUDA is taken, and nothing is computed.

    python bench/pretended_card.py python bench/gpu.py --parts lora,loss

Two libraries of C stand in for the driver and for what torch calls of the runtime and cuBLAS: memory is counted and
never touched, copies are made, streams and events are at once done, and kernels do nothing. So devices that do not fit,
arguments torch refuses, what its allocator holds at most, and calls that would wait for the card are as on a card;
values, times and what depends on them are not. cuDNN and profilers do not run, and `generate()` never ends.

Needs a compiler, the headers of the CUDA runtime (CUDA_HOME), and a torch that is built for CUDA.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "pretended"
HEADERS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
USERS = ("torch_cuda", "c10_cuda", "torch_python", "torch_cpu", "torch_cuda_linalg")


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shardwise-card-") as scratch:
        place = Path(scratch)
        build(place / "libruntime.so", "runtime", wanted_of_torch())
        names = set(re.findall(r"\bcu[A-Z]\w+", (HEADERS / "cuda.h").read_text()))
        build(place / "libcuda.so.1", "driver", {name for name in names if not re.search(r"_(t|st|enum|flags)$", name)})
        (place / "libcuda.so").symlink_to("libcuda.so.1")
        environment = {
            "LD_PRELOAD": str(place / "libruntime.so"),
            "LD_LIBRARY_PATH": scratch,
            "TRITON_LIBCUDA_PATH": scratch,
        }
        return subprocess.run(sys.argv[1:], env={**os.environ, **environment}, check=False).returncode


def wanted_of_torch() -> set[str]:
    """The functions that torch's libraries expect in the libraries of CUDA."""
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    libraries = [Path(found.origin).parent / "lib" / f"lib{name}.so" for name in USERS]
    undefined = (subprocess.check_output(["nm", "-D", "--undefined-only", path], text=True) for path in libraries)
    return set(re.findall(r"\b(?:cuda|cublas|nccl)[A-Z]\w*", "".join(undefined)))


def build(library: Path, source: str, names: set[str]) -> None:
    """A library of what `source` defines, and of functions for the other names that only say that all is well."""
    written, others = library.parent / f"{source}.o", library.parent / f"{source}_others.c"
    subprocess.check_call(["cc", "-w", "-O1", "-fPIC", f"-I{HEADERS}", "-c", SOURCES / f"{source}.c", "-o", written])
    defined = set(re.findall(r" T (\w+)", subprocess.check_output(["nm", written], text=True)))
    others.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names - defined)))
    named = f"-Wl,-soname,{library.name}"
    subprocess.check_call(["cc", "-w", "-shared", "-fPIC", named, "-o", library, written, others, "-lpthread"])


if __name__ == "__main__":
    sys.exit(main())
