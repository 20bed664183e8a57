"""Small PTX kernels as text, run on the emulator: for the emulator's own tests."""

import numpy as np
import torch
from ptx_emulator import Kernel, Machine

TEMPLATE = """
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
{parameters}
)
.reqntid {n_threads}
{{
    .reg .pred %p<32>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<300>;
    .reg .b64 %rd<64>;
    .reg .b16 %h<2>;
    .reg .b32 %a<2>;
    .reg .b64 %b<2>;
{body}
    ret;
}}
"""

# {prefix of a register: bits of what it holds}
WIDTHS = {"p": 8, "rs": 16, "r": 32, "rd": 64}


def text_of(body, n_parameters=0, n_threads=32, target="sm_90a"):
    """The PTX of a kernel whose parameters are pointers, kernel_param_0 and so on."""
    parameters = ",\n".join(
        f"    .param .u64 .ptr .global .align 1 kernel_param_{n}" for n in range(n_parameters)
    )
    return TEMPLATE.format(target=target, parameters=parameters, n_threads=n_threads, body=body)


def launch(body, *tensors, grid=(1, 1, 1), n_threads=32, shared_bytes=0, order=None, **options):
    """Run a kernel, whose parameters are the tensors, over a grid. Returns the machine."""
    kernel = Kernel(text_of(body, len(tensors), n_threads))
    named = {f"tensor_{n}": tensor for n, tensor in enumerate(tensors)}
    machine = Machine(kernel, shared_bytes, named, **options)
    machine.set_parameters([machine.global_memory.address(tensor) for tensor in tensors])
    programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    with np.errstate(all="ignore"):
        for n in order or range(len(programs)):
            machine.run(programs[n], grid)
    return machine


def width_of(register):
    return WIDTHS[register.strip("%").rstrip("0123456789")]


def evaluate(instructions, inputs, outputs, shared_bytes=0):
    """Run instructions in one thread for each value, and return registers.

    inputs: {register: unsigned array (n,)}, all of one length; predicates as 0 or 1.
    outputs: names of registers; returns their values, one array (n,) each.
    """
    n = len(next(iter(inputs.values())))
    n_threads = -(-n // 32) * 32
    lines = ["mov.u32 %a0, %tid.x;"]
    tensors = []
    for register, values in inputs.items():
        bits = width_of(register)
        padded = np.resize(np.array(values, f"u{bits // 8}"), n_threads)
        lines += [
            f"ld.param.b64 %b0, [kernel_param_{len(tensors)}];",
            f"mad.wide.u32 %b0, %a0, {bits // 8}, %b0;",
            f"ld.global.b{bits} {'%h0' if bits == 8 else register}, [%b0];",
        ]
        if bits == 8:
            lines.append(f"setp.ne.b16 {register}, %h0, 0;")
        tensors.append(torch.from_numpy(padded))
    lines.append(instructions)
    for register in outputs:
        bits = width_of(register)
        if bits == 8:
            lines.append(f"selp.b16 %h0, 1, 0, {register};")
        lines += [
            f"ld.param.b64 %b0, [kernel_param_{len(tensors)}];",
            f"mad.wide.u32 %b0, %a0, {bits // 8}, %b0;",
            f"st.global.b{bits} [%b0], {'%h0' if bits == 8 else register};",
        ]
        tensors.append(torch.from_numpy(np.zeros(n_threads, f"u{bits // 8}")))
    launch("\n".join(lines), *tensors, n_threads=n_threads, shared_bytes=shared_bytes)
    return [tensor.numpy()[:n] for tensor in tensors[len(inputs) :]]
