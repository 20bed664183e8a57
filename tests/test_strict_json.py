"""JSON without NaN and Infinity."""

import ast
import json
import math

import pytest
from conftest import ROOT

from nanolong.strict_json import to_json


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("indent", [None, 1])
def test_numbers_that_are_not_finite_become_null(indent):
    value = {"a": [1.5, math.nan, {"b": (math.inf, -math.inf)}], "c": "NaN", "d": None, "e": True}
    text = to_json(value, indent)
    expected = {"a": [1.5, None, {"b": [None, None]}], "c": "NaN", "d": None, "e": True}
    assert json.loads(text, parse_constant=refuse) == expected
    assert math.isnan(value["a"][1])  # the value itself stays


# These write what another process of theirs reads, or what is wrong on purpose; checkpoint.py makes
# a text to hash, of what write_meta() has refused to write with NaN.
MAY_WRITE_NAN = {
    "nanolong/run/checkpoint.py",
}


def test_json_is_written_strictly():
    files = [*ROOT.glob("*.py")]
    for folder in ("data", "nanolong", "experiments"):
        files += (ROOT / folder).rglob("*.py")
    for file in files:
        if file.relative_to(ROOT).as_posix() in MAY_WRITE_NAN:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps"):
                assert "allow_nan=False" in ast.unparse(node), file
