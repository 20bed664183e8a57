"""A fault in a kernel is found: the checks of the compiled kernels, checked.

By default a few faults, one for each kind of check; --all tries those of mutations.py.
"""

import random

import pytest
from faults import MUTATIONS
from mutations import STALE, try_mutation


@pytest.mark.parametrize(
    "mutation",
    [
        mutation if mutation.fast else pytest.param(mutation, marks=pytest.mark.slow)
        for mutation in MUTATIONS
    ],
    ids=lambda mutation: mutation.name,
)
def test_faults_are_found(mutation, rng):
    # with random masks: some hide a fault, as 40 sinks do in a short text
    for seed in rng.integers(1 << 30, size=4):
        random.seed(int(seed))
        outcome = try_mutation(mutation)
        print(outcome)
        if outcome.found_by or mutation.equivalent:
            break
    assert outcome.found_by != STALE
    assert bool(outcome.found_by) != bool(mutation.equivalent)


def test_mutations_have_names_of_their_own():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
