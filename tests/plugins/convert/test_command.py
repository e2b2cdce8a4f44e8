"""``holdfast convert``: its output, and its refusals."""

from pathlib import Path

import pytest
import torch

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from tests.plugins.convert.hosts import Host, assert_same, tiny_config
from tests.recover.cli.commands import answer, holdfast

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_dcp(tmp_path / "ours", Host().train(1).state)
    tiny_config().save_pretrained(tmp_path / "config")
    return tmp_path / "ours"


def test_a_folder_is_converted_and_described(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "areal"
    code, out, err = holdfast(
        "convert", source, target, "--to", "areal", "--config", tmp_path / "config"
    )
    assert code == 0, err
    assert f"{target}: DCP, root 'dcp' as areal, with optimizer state" in out
    assert "tensors, " in out and "read back and equal to the source" in out
    host = Host(3)
    load_dcp(target, host.state)
    assert_same(host.tensors(), Host().train(1).tensors())


def test_the_result_as_json(source: Path, tmp_path: Path) -> None:
    arguments = (
        source,
        tmp_path / "e" / "t",
        "--to",
        "generation",
        "--step",
        "4",
        "--engine",
        "actor",
    )
    done = answer("convert", *arguments, "--steps-per-epoch", "10")
    assert done["step"] == 4 and done["to"] == "generation" and list(done["lacks"]) == ["data"]
    assert (tmp_path / "e" / "t" / "recover" / "global_step_4" / "actor" / ".metadata").is_file()
    code, _, err = holdfast("convert", *arguments, "--json")
    assert code == 2 and "error: " in err and "global_step_4" in err


def test_a_weight_file_that_was_cut_is_named_with_its_bytes_and_what_to_do(tmp_path: Path) -> None:
    model = Host().model
    source = tmp_path / "weights"
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), path := source / "pytorch_model.bin")
    whole = path.read_bytes()
    for n_bytes in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n_bytes])
        code, _, err = holdfast("convert", source, tmp_path / "dcp", "--to", "dcp")
        assert (code, err) == (
            1,
            f"damaged: {path} cannot be read: it ends after {n_bytes} bytes, without the table of "
            "contents that torch.save writes last. Copy the file again, or use an older "
            "checkpoint\n",
        )


def test_errors_end_in_one_message(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "c"
    for given, expected in (
        ((tmp_path / "no", target, "--to", "dcp"), "error: there is no folder"),
        ((source, target, "--to", "hf"), "name a folder that has the model's"),
        (("s3://bucket/run", target, "--to", "dcp"), "error: source is s3://bucket/run"),
    ):
        code, _, err = holdfast("convert", *given)
        assert code == 2 and expected in err, err
    assert not target.exists()
