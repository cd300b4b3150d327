"""Builds the null device, a library that stands in for libcuda, libcudart, cuBLAS, NCCL and NVML,
and says how to load it.

    python tests/nullcuda/build.py      # with the python of an environment that has the CUDA build of torch; prints the folder

The folder is inside the environment and has the sources' hash in its name: another version of them
is built beside it.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE, PACKAGES = Path(__file__).parent, Path(sysconfig.get_paths()["purelib"])
SOURCES = ["driver.cpp", "runtime.cpp", "libraries.cpp"]
# libcuda.so.1 is what programs open by name or are linked with; it is loaded once, whatever name it
# is asked by
NAMES = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]
ASKED_OF_US = re.compile(r"(__cuda|cuda[A-Z]|cublas|nccl)\w+")
PRODUCT = re.compile("gemm|gemv|dot|trsm|matmul", re.I)


def has_cuda_build() -> bool:
    """Whether this python's torch is a CUDA build with NVIDIA's packages beside it, without
    importing it."""
    return importlib.util.find_spec("torch") is not None and any(
        PACKAGES.glob("torch/lib/libtorch_cuda.so")
    )


def symbols(kind: str, *files) -> set[str]:
    """Names that object files or libraries define or ask for: kind is an option of nm."""
    lines = subprocess.run(
        ["nm", kind, *map(str, files)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {
        line.split()[-1].split("@")[0] for line in lines if line.strip() and not line.endswith(":")
    }


def do_nothing(defined: set[str], headers: Path) -> str:
    """C++: a function that returns 0 for whatever torch asks of these libraries, or the driver has,
    and is not defined yet."""
    libraries = [*PACKAGES.glob("torch/lib/*.so"), *PACKAGES.glob("torchao/*.so")]
    names = {
        name for file in libraries for name in symbols("-Du", file) if ASKED_OF_US.fullmatch(name)
    }
    driver = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", (headers / "cuda.h").read_text()))
    names |= driver | {f"{name}_v2" for name in driver}  # asked for by name: cuGetProcAddress
    lines = ["void null_blas(const char*);"]
    for name in sorted(names - defined):
        if name.startswith("cublas") and PRODUCT.search(name) and "Lt" not in name:
            says = f'null_blas("{name}"); '
        else:
            says = ""
        lines.append(f"int {name}() {{ {says}return 0; }}")
    return 'extern "C" {\n' + "\n".join(lines) + "\n}\n"


def build() -> Path:
    """The folder of the built library, made where it is missing."""
    files = [
        Path(__file__),
        *sorted(path for path in HERE.rglob("*") if path.suffix in (".cpp", ".h")),
    ]
    text = b"".join(path.read_bytes() for path in files)
    digest = hashlib.sha256(text + importlib.metadata.version("torch").encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / "nullcuda" / digest
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    headers = PACKAGES / "nvidia/cu13/include"
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        out = Path(name) / "built"
        out.mkdir()
        compile = ["g++", "-std=c++17", "-O1", "-fPIC", f"-I{HERE}", f"-I{headers}"]
        for source in SOURCES:
            subprocess.run(
                [*compile, "-c", str(HERE / source), "-o", str(out / f"{source}.o")], check=True
            )
        objects = [str(out / f"{source}.o") for source in SOURCES]
        (out / "nothing.cpp").write_text(do_nothing(symbols("--defined-only", *objects), headers))
        link = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(out / "libcuda.so.1"), "-ldl"]
        subprocess.run([*compile, str(out / "nothing.cpp"), *objects, *link], check=True)
        for other in NAMES[1:]:
            (out / other).symlink_to(NAMES[0])
        try:
            out.rename(folder)
        except OSError:  # another process was first
            assert folder.exists()
    return folder


def environment() -> dict[str, str]:
    """Variables that make a new process see the null device."""
    folder = str(build())
    return {
        "LD_PRELOAD": f"{folder}/libcuda.so.1",
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        # its pool of processes would be started anew by every run
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Kernels of this environment only: what one that has the package dill compiled cannot be
        # loaded by one that has not.
        "TORCHINDUCTOR_CACHE_DIR": f"{Path(folder).parent}/compiled",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


if __name__ == "__main__":
    print(build())
