"""Machine code is split into loops and priced by known rates."""

import pytest
from ptx_emulator import cycles


def test_an_unknown_opcode_is_an_error():
    with pytest.raises(ValueError, match="QMMA.16832"):
        cycles.opcode_row("QMMA.16832.F32.E4M3.E4M3")


def test_machine_code_is_split_into_innermost_loops():
    sass = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0020*/              @!P0 FADD R2, R2, R3 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   BRA `(.L_x_3);
"""
    inner, outside = cycles.read_loops(sass)
    assert [[opcode for opcode, _ in loop] for loop in inner] == [["FADD", "BRA"]]
    assert [opcode for opcode, _ in outside] == ["MOV", "IADD3", "BRA", "BRA"]


def test_matrix_instructions_of_a_warp_group_read_shared_memory():
    both = "R24, gdesc[UR4], R24, !UPT ;"
    right = "R24, R4, gdesc[UR4], R24 ;"
    assert cycles.warpgroup_bytes("HGMMA.64x128x16.F32.BF16", both) == 2 * 16 * (128 + 64)
    assert cycles.warpgroup_bytes("HGMMA.64x128x16.F32.BF16", right) == 2 * 16 * 128
    assert cycles.products("HGMMA.64x128x16.F32.BF16", "sm_90") == (16 * 128 * 16, 2048)
    assert cycles.products("HMMA.1688.F32.TF32", "sm_80") == (16 * 8 * 8, 512)
