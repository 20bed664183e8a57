"""A fault in a kernel is found: the checks of the compiled kernels, checked.

Each fault of faults.py is put into the source of a kernel, in a copy of its file in a temporary
folder, or into the PTX that the compiler made of a kernel. The check that it names (checks.py) then
runs the faulty kernel, and has to fail. A text that no longer occurs is an error, so that no fault
stays behind unnoticed when the kernels change.
"""

import importlib.util
import random
import re
import sys

import execution
import pytest
from checks import CHECKS
from faults import EQUIVALENT, EVERY, FAST, MUTATIONS
from kernel_cases import at_level
from launchers import ROOT
from ptx_emulator import Fault

FOUND = (Fault, execution.WrongNumber, execution.WrongOrder)


def replace_occurrence(text, mutation):
    """The text with the fault in it."""
    count = text.count(mutation.old)
    wanted = mutation.occurrence
    is_there = count == 1 if wanted is None else count > wanted
    assert is_there, f"{mutation.old!r} occurs {count} times"
    pieces = text.split(mutation.old)
    at = (wanted or 0) + 1
    return mutation.old.join(pieces[:at]) + mutation.new + mutation.old.join(pieces[at:])


def faulty_modules(mutation, folder):
    """The project's files of kernels, one of them with the fault in it."""
    name = f"faulty_{re.sub(r'[^a-z0-9]+', '_', mutation.name.lower())}"
    source = (ROOT / "kernels" / mutation.file).read_text(encoding="utf-8")
    # operators of its own: a name can be registered only once
    source = replace_occurrence(source, mutation).replace('"nanolong::', f'"{name}::')
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    module = f"kernels.{name}"  # of the package, so that it finds flash.py
    spec = importlib.util.spec_from_file_location(module, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return execution.PROJECT._replace(**{mutation.file.removesuffix(".py"): loaded})


def ptx_edit(mutation):
    """A function that puts the fault into PTX."""

    def edit(text):
        places = list(re.finditer(mutation.old, text, re.MULTILINE))
        wanted = max(mutation.occurrence or 0, 0)
        assert len(places) > wanted, f"{mutation.old!r} occurs {len(places)} times"
        if mutation.occurrence == EVERY:
            return re.sub(mutation.old, mutation.new, text, flags=re.MULTILINE)
        place = places[wanted]
        return text[: place.start()] + place.expand(mutation.new) + text[place.end() :]

    return edit


def is_found(mutation, folder):
    """Run the check with the fault in place."""
    modules, edits = execution.PROJECT, {}
    if mutation.file:
        modules = faulty_modules(mutation, folder)
    else:
        edits[mutation.kernel] = ptx_edit(mutation)
    try:
        execution.perform(mutation.check, CHECKS[mutation.check], modules, edits)
    except FOUND as found:
        print(type(found).__name__, found)
        return True
    return False


def in_levels():
    """All faults: some run by default, every fifth with --all, the rest with --exhaustive."""
    for i, mutation in enumerate(MUTATIONS):
        level = "fast" if mutation.name in FAST else "exhaustive" if i % 5 else "slow"
        yield at_level(level, mutation, id=mutation.name)


@pytest.mark.parametrize("mutation", list(in_levels()))
def test_faults_are_found(mutation, rng, tmp_path):
    changes_nothing = mutation.name in EQUIVALENT
    n_tries = 1 if changes_nothing else 4  # some random masks hide a fault, as 40 sinks do
    found = False
    while n_tries and not found:
        random.seed(int(rng.integers(1 << 30)))
        found = is_found(mutation, tmp_path)
        n_tries -= 1
    assert found != changes_nothing


def test_mutations_have_names_of_their_own():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
