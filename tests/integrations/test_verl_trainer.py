"""verl's unchanged SFT trainer on two CPU ranks, killed and started again, in verl's own
environment.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

pytest.importorskip("verl")
try:
    import verl.trainer.sft_trainer  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    pytest.skip(
        f"verl's trainers need the packages that verl asks for: {error}", allow_module_level=True
    )

from tests.integrations.processes import run_killed
from tests.integrations.verl_sft import main, prepare

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@cache
def inputs() -> Path:
    prepare(folder := Path(mkdtemp()))
    return folder


@cache
def untouched() -> str:
    run_killed(main, folder := Path(mkdtemp()), [], inputs(), ranks=2)
    return (folder / "digest.txt").read_text()


@pytest.mark.parametrize("plain", [False, True], ids=["holdfast", "verl's own"])
def test_verls_sft_trainer_killed_ends_with_the_weights_and_moments_of_one_left_alone(
    plain: bool, tmp_path: Path
) -> None:
    kills = [(inputs(), kill, plain) for kill in ("saved:3", "named:8")]
    run_killed(main, tmp_path, kills, inputs(), "", plain, ranks=2)
    assert (tmp_path / "digest.txt").read_text() == untouched()
    if not plain:
        steps = sorted(path.name for path in tmp_path.glob("global_step_*"))
        assert steps == ["global_step_11", "global_step_12"]
