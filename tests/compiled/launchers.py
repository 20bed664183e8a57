"""Our kernels on the emulator, with the tiles and the precision that they have on a GPU."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import ptx_emulator  # noqa: E402
import torch  # noqa: E402


def float32_precision(target):
    """How kernels compute products of float32 on an architecture."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


def install(module, target, **options):
    """ptx_emulator.install() for a module of kernels/: {name: Launcher}."""

    def adjust(args, kwargs):
        # on a CPU's tensors the module would not ask for a GPU's precision
        if "PRECISION" not in kwargs:
            return kwargs
        is_float32 = args[0].dtype == torch.float32
        return {**kwargs, "PRECISION": float32_precision(target) if is_float32 else "ieee"}

    launchers = ptx_emulator.install(module, target, **options)
    for launcher in launchers.values():
        launcher.adjust = adjust
    if hasattr(module, "device_family"):
        family = {"sm_89": "sm_86"}.get(target, target)
        module.device_family = lambda device: (family, float32_precision(target))
    return launchers
