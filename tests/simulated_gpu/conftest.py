"""Start processes on the simulated GPU."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

from flags import last_of_each_flag  # noqa: E402


def what_is_missing():
    """Why there can be no simulated GPU here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the simulated GPU is a library for Linux on x86-64"
    if not torch.version.cuda:
        return "the CUDA build of torch is not installed: make simulated-gpu installs it"
    if not all(shutil.which(program) for program in ("gcc", "g++", "nm")):
        return "there is no C++ compiler (install g++)"
    return None


def pytest_collection_modifyitems(items):
    reason = what_is_missing()
    for item in items:
        if reason and HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def simulated_gpu(tmp_path_factory):
    """The environment of a process with the simulated GPU, which is built here."""
    from build import build

    library = build(tmp_path_factory.mktemp("simulated-gpu"))
    cache = os.environ.get("SIMULATED_GPU_CACHE") or tmp_path_factory.mktemp("cache")
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "XDG_CACHE_HOME": f"{cache}/verdicts",
        "NANOLONG_CHECK": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def simulate(simulated_gpu, tmp_path_factory):
    """
    Run a script on the simulated GPU; returns it finished, with stdout, stderr and report.

    values: compute real numbers, and if it is "emulated" execute our kernels' own PTX; processes:
    of torchrun, each on a GPU of its own; devices, gb and capability: of the simulated machine;
    report: what was counted, where the process has ended by itself (of one of them, where there are
    several).
    """

    def simulate(
        *words, values=True, processes=0, devices=1, gb=80, capability=90, cwd=ROOT, env=None
    ):
        launcher = [sys.executable]
        if processes:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
            devices = processes
        file = tmp_path_factory.mktemp("report") / "report.json"
        numbers = {True: ["--values"], "emulated": ["--emulated"], False: []}[values]
        start = [str(HERE / "start.py"), *numbers, f"--report={file}"]
        machine = {"DEVICES": devices, "GB": gb, "CAPABILITY": capability}
        settings = {f"SIMULATED_GPU_{name}": str(value) for name, value in machine.items()}
        done = subprocess.run(
            [*launcher, *start, *last_of_each_flag(words)],
            cwd=cwd,
            env={**os.environ, **simulated_gpu, **settings, **(env or {})},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        done.report = json.loads(file.read_text()) if file.exists() else None
        return done

    return simulate


def json_lines(done):
    """The lines of JSON that a script of cases printed. Fails where it did not end well."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
