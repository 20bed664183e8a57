"""Build the simulated GPU: driver.cpp, nccl.cpp, and stubs for all else that torch needs of CUDA.

    python tests/simulated_gpu/build.py FOLDER    # makes FOLDER/libcuda.so.1, in seconds

The stubs do nothing and return success. Their names come from torch's and Triton's own files, so
the same sources fit several versions of torch.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH_LIBRARIES = (
    "libtorch_cuda",
    "libc10_cuda",
    "libtorch_python",
    "libtorch_cuda_linalg",
    "libcaffe2_nvrtc",
    "libtorch_nvshmem",
)
# matrix products of cuBLAS, which are counted
PRODUCT = re.compile(r"cublas([SDCZ]gemm|GemmEx|GemmStr|SgemmEx|[SDCZ]gemv|DotEx|[SD]dot)")
FLAGS = ["-O1", "-fPIC", "-std=c++17"]


def build(folder):
    """Build the library and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    site = Path(find_spec("torch").origin).parent.parent
    headers = [f"-I{site}/nvidia/cu13/include", f"-I{site}/triton/backends/nvidia/include"]
    objects = []
    for source in ("driver", "nccl"):
        objects.append(folder / f"{source}.o")
        run("g++", *FLAGS, *headers, "-c", HERE / f"{source}.cpp", "-o", objects[-1])
    defined = {name for file in objects for name in symbols(file, "--defined-only")}
    stubs = folder / "stubs.c"
    stubs.write_text(write_stubs(sorted(needed_names(site) - defined)))
    objects.append(folder / "stubs.o")
    run("gcc", "-O1", "-fPIC", "-w", "-c", stubs, "-o", objects[-1])
    library = folder / "libcuda.so.1"
    # renamed when it is whole, since several test processes may build it
    new = folder / "libcuda.so.1.new"
    run("g++", "-shared", "-Wl,-soname,libcuda.so.1", *objects, "-ldl", "-lrt", "-o", new)
    new.rename(library)
    nvml = folder / "libnvidia-ml.so.1"
    nvml.unlink(missing_ok=True)
    nvml.symlink_to(library.name)
    return library


def run(*words):
    subprocess.run([str(word) for word in words], check=True)


def symbols(file, *options):
    output = subprocess.run(["nm", *options, file], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in output.stdout.splitlines() if line.split()}


def needed_names(site):
    """The functions of CUDA, cuBLAS, NCCL and NVML that torch and Triton may call."""
    names = set()
    for library in TORCH_LIBRARIES:
        file = site / f"torch/lib/{library}.so"
        names |= symbols(file, "-D", "--undefined-only") if file.exists() else set()
    names = {name for name in names if re.match(r"__cuda|cuda[A-Z]|cublas|nccl|cu[A-Z]", name)}
    for file in ("torch/include/c10/cuda/driver_api.h", "triton/backends/nvidia/driver.c"):
        text = (site / file).read_text()
        names |= set(re.findall(r"\b(cu[A-Z]\w+|nvml\w+)\b", text))
    types = ("_t", "KernelExHandle")
    return {name for name in names if not name.startswith("cuFile") and not name.endswith(types)}


def write_stubs(names):
    lines = ["extern int simulated_product();"]
    for name in names:
        result = "simulated_product()" if PRODUCT.match(name) else "0"
        lines.append(f"int {name}() {{ return {result}; }}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(build(sys.argv[1]))
