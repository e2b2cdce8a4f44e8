"""Each wait of the product for a device is needed: a test fails without it."""

import importlib.util
from pathlib import Path

import pytest

from tests.simulated_cuda.build import BuildError, built_library
from tests.simulated_cuda.mutated import mutated
from tests.simulated_cuda.mutations import MUTATIONS, Mutation, is_found

BY_NAME = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


@BY_NAME
def test_the_wait_is_where_the_table_says_and_so_is_its_test(mutation: Mutation) -> None:
    spec = importlib.util.find_spec(mutation.module)
    assert spec is not None and spec.origin is not None
    compile(mutated(Path(spec.origin).read_text(), mutation.old, mutation.new), spec.origin, "exec")
    assert f"def test_{mutation.test}(" in Path(__file__).with_name("test_holdfast.py").read_text()


@pytest.mark.slow
@BY_NAME
def test_a_test_fails_without_the_wait(mutation: Mutation) -> None:
    try:
        built_library()
    except BuildError as error:
        pytest.skip(f"no simulated CUDA devices here: {error}")
    found, output = is_found(mutation)
    assert found, output
