"""Count what the kernels of attention cost once compiled, without a GPU.

    python tests/compiled/count.py                         every kernel and term, sm_80, D = 64
    python tests/compiled/count.py --arch=sm_90 --kernel=dq --term=table --dim=128
    python tests/compiled/count.py --json=FILE             writes JSON, too

tools/ptx_emulator/cycles.py says what is counted and how. In our kernels a turn of a loop is a
tile.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter and the compiler exclude each other
import torch  # noqa: E402
from kernel_cases import bias_arguments, bias_leaves  # noqa: E402
from launchers import install  # noqa: E402
from ptx_emulator.cycles import count_launch, table  # noqa: E402

BIASES = ("none", "slopes", "table", "shaw", "xl")
KERNELS = ("forward", "dq", "dkdv", "sweep")
# the loops of each kernel, in the order of the source; the first are the segments with a mask
LOOPS = {
    "forward": ("masked", "whole", "clipped"),
    "dq": ("masked", "whole", "clipped"),
    "dkdv": ("masked", "masked, last queries", "whole", "clipped"),
    "sweep": ("tile",),
}


def count_attention(arch, term, D, kernels=KERNELS, dtype=torch.bfloat16):
    """Count the kernels of attention forward and backward: {kernel: KernelCount}.

    The text is as short as lets every loop turn: six of the larger side of a tile.
    """
    from kernels import flash

    launchers = install(flash, arch, profile=True, races=False)
    flash.SWEEP_PROGRAMS = 1  # a program for a whole diagonal, so that its loop turns
    wanted = [kernel for kernel in kernels if kernel != "sweep" or term not in ("none", "slopes")]
    tiles = {kernel: tile_of(arch, term, D, kernel, dtype) for kernel in wanted}
    found = {}
    for is_forward in (True, False):
        group = [kernel for kernel in wanted if (kernel == "forward") == is_forward]
        if not group:
            continue
        T = 6 * max(max(tiles[kernel][:2]) for kernel in group)
        torch.manual_seed(0)
        tensors = [torch.randn(2, 1, T, D).to(dtype).requires_grad_() for _ in range(3)]
        leaves = bias_leaves(term, 1, T // 2 + 1, D, dtype)
        terms = bias_arguments(term, [x.requires_grad_() for x in leaves])
        out = flash.attention(*tensors, **terms)
        if not is_forward:
            out.backward(torch.randn_like(out))
        for kernel in group:
            found[kernel] = count_launch(launchers[f"_{kernel}_kernel"], LOOPS[kernel])
            found[kernel].tile = tiles[kernel]
    return found


def tile_of(arch, term, D, kernel, dtype=torch.bfloat16):
    """The Tile that flash.py chooses."""
    from kernels import flash

    kind = min(BIASES.index(term), 3)
    return flash.tile_for(torch.empty(1, 1, 1, D, dtype=dtype), kind, kernel)


def main(words):
    options = {"arch": "sm_80", "kernel": "", "term": "", "dim": "64", "json": ""}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in options:
            sys.exit(f"error: no option {word}: use {', '.join('--' + x for x in options)}")
        options[name] = value
    rows = []
    for term in [options["term"]] if options["term"] else BIASES:
        kernels = [options["kernel"]] if options["kernel"] else KERNELS
        counts = count_attention(options["arch"], term, int(options["dim"]), kernels)
        for kernel, count in counts.items():
            BM, BN, _, stages = count.tile
            title = (
                f"{count.arch} {kernel}, {term}, D = {options['dim']}, {BM}x{BN}, {stages} stages"
            )
            print("\n".join(table(count, title)) + "\n", flush=True)
            rows.append({"kernel": kernel, "term": term, "dim": options["dim"], **asdict(count)})
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main(sys.argv[1:])
