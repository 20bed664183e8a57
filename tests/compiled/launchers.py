"""Our kernels on the emulator, with the tiles and the precision that they have on a GPU."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import ptx_emulator  # noqa: E402


def float32_precision(target):
    """How kernels compute products of float32 on an architecture."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


def install(module, target, **options):
    """ptx_emulator.install() for a module of kernels/: {name: Launcher}."""
    if hasattr(module, "device_family"):
        family = target if target in ("sm_80", "sm_90") else "small"
        module.device_family = lambda device: (family, float32_precision(target))
    return ptx_emulator.install(module, target, **options)
