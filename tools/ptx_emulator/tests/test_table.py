"""Every instruction of the emulator's table has a case in the emulator's tests."""

import test_arithmetic
import test_matrices
import test_movement
from ptx_emulator import OPERATIONS
from ptx_emulator.table import expand

FILES = (test_arithmetic, test_movement, test_matrices)


def test_each_instruction_is_tested():
    tested = set().union(*(file.TESTED for file in FILES))
    assert set(OPERATIONS) - tested == set()
    assert tested - set(OPERATIONS) == set()


def test_patterns_expand_to_whole_names():
    assert expand("ret") == ["ret"]
    assert expand("ld{,.v2}.{b8,b16}") == ["ld.b8", "ld.b16", "ld.v2.b8", "ld.v2.b16"]
