"""Compile a Triton kernel ahead of time for an architecture, without a GPU, and read off what it costs. A script: prints JSON, one object a line.

    python tests/aot.py            compiles the kernels for sm_80, 86, 89, 90, 100, 120 and gfx942; --all: at every head dimension

Triton's interpreter and its compiler cannot live in one process, so tests/test_kernels.py runs this in a child. Pointers, strides and token counts are declared
divisible by 16, as the just-in-time compiler finds them in a model: without that the code is not the code that runs.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = [("cuda", 80), ("cuda", 86), ("cuda", 89), ("cuda", 90), ("cuda", 100), ("cuda", 120), ("hip", "gfx942")]
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


def compile_for(kernel, target, signature, constants, **options):
    """Compile; returns a dict with registers, spilled bytes (stack), shared memory, and counts of the opcodes that matter."""
    kind, arch = target
    signature = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name] != "constexpr" and (signature[name][0] == "*" or name == "T" or "_" in name)}
    done = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned), target=GPUTarget(kind, arch, 64 if kind == "hip" else 32), options=options)
    if kind == "hip":
        text = done.asm["amdgcn"]
        number = lambda word: int(re.search(rf"{word}:?\s+(\d+)", text)[1])  # noqa: E731
        return {"registers": number(r"\.vgpr_count"), "stack": number(r"\.vgpr_spill_count") + number("ScratchSize"), "shared": done.metadata.shared,
                "wide": len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", text)), "narrow": len(re.findall(r"(?:global|buffer)_(?:load|store)_(?:short|ushort)", text))}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run([BIN / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # STACK is where spills show; LOCAL stays 0
    return {"registers": registers, "stack": stack, "shared": done.metadata.shared, "wide": len(re.findall(r"(?:LDG|STG)\.E\.(?:\w+\.)*128", sass)), "narrow": len(re.findall(r"(?:LDG|STG)\.E\.(?:\w+\.)*U16", sass))}


def rope_cases():
    """The rotation at the head dimensions of real models, forward and backward."""
    from kernels.rotary import _rotate_kernel, tile
    ints = {name: "i32" for name in _rotate_kernel.arg_names if name[0].islower() or name in ("T", "H", "HK")}
    for D, R in ((64, 64), (128, 128), (64, 32), *(((16, 16), (80, 80), (96, 96), (256, 256), (128, 64)) if "--all" in sys.argv else ())):
        for inverse in (False, True):
            step = tile(D)
            power = triton.next_power_of_2
            constants = {"D": D, "HALF": R // 2, "HALF_P2": power(R // 2), "REST_P2": power(D - R) if D > R else 0, "BT": step["BT"], "GROUP": step["GROUP"], "INVERSE": inverse}
            signature = {**ints, **{name: "*bf16" for name in ("Q", "K", "Q_OUT", "K_OUT")}, "COS": "*fp32", "SIN": "*fp32"}
            yield f"rope D={D} R={R}{' backward' * inverse}", _rotate_kernel, signature, constants, {"num_warps": step["num_warps"]}


if __name__ == "__main__":
    for name, kernel, signature, constants, options in rope_cases():
        for target in TARGETS:
            print(json.dumps({"kernel": name, "target": "sm_%s" % target[1] if target[0] == "cuda" else target[1], **compile_for(kernel, target, signature, constants, **options)}), flush=True)
