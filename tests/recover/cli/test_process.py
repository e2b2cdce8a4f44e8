"""The command as a process: its start time, its imports, its end."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.recover.cli.main import _COMMANDS, cli
from tests.limits import stretched
from tests.recover.cli.commands import HOLDFAST, finish, flip_byte, holdfast, start
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

IMPORTED = """
import sys
from holdfast.recover.cli.main import cli
try:
    cli.main(sys.argv[1:])
finally:
    slow = ("torch", "transformers", "numpy", "ray")
    print([name for name in slow if name in sys.modules], file=sys.stderr)
"""

WITHOUT_CONVERTER = """
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name == "holdfast_convert":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing)
from holdfast.recover.cli.main import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    slow_but(
        ["--help", "ls", "resume-from", "mirror ls"],
        ["--help", "ls", "verify", "why", "top", "resume-from", "pin", "mirror ls"],
    ),
)
def test_commands_that_read_no_tensor_do_not_import_torch(command: str, run: Path) -> None:
    where = (
        ()
        if command == "--help"
        else (str(run) + ("@1" if command in ("pin", "resume-from") else ""),)
    )
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED, *command.split(), *where],
        capture_output=True,
        text=True,
        timeout=stretched(60),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"


def test_misuse_ends_with_2_and_a_line_that_says_what_to_do(tmp_path: Path) -> None:
    for args, told in (
        (("ls",), "Missing argument 'RUN'"),
        (("nothing",), "No such command"),
        (("ls", "--what", "x"), "No such option"),
        (("ls", tmp_path / "x"), "there is no folder"),
        (("ls", "nowhere://x/y"), "cannot be used"),
        (("show", f"{tmp_path}@3"), "not the folder of a run"),
        (("pin", "s3://bucket/e/t/global_step_3"), "on this machine"),
    ):
        code, out, err = finish(start(*args))
        assert (code, out) == (2, "") and told in err and "Traceback" not in err


def test_convert_says_how_to_install_it_where_it_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_CONVERTER]
    told = (
        "error: the converter is not installed; from a checkout of Holdfast: pip install "
        "./plugins/convert\n"
    )
    for args, code, expected in (
        (["convert", str(tmp_path), "there", "--to", "hf", "--json"], 2, told),
        (["convert"], 2, told),
        (["convert", "--help"], 0, ""),
        (["--help"], 0, ""),
    ):
        done = subprocess.run(
            [*command, *args], capture_output=True, text=True, timeout=stretched(60)
        )
        assert (done.returncode, done.stderr) == (code, expected)
        assert ("holdfast-convert" in done.stdout) == (code == 0)


def test_found_damage_ends_with_1(run: Path) -> None:
    flip_byte(run / "recover" / "global_step_7" / "data.pt", 300)
    code, out, err = finish(start("verify", run))
    assert code == 1 and "DAMAGED" in out and err == ""


def test_ctrl_c_ends_a_command_without_a_traceback(run: Path) -> None:
    process = start("rm", f"{run}@3", stdin=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.read(6) == "Delete"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "aborted" in err and "Traceback" not in err
    assert (run / "recover" / "global_step_3").is_dir()


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(finished: Path) -> None:
    process = start("show", finished, "--tensors")
    assert process.stdout is not None
    process.stdout.close()  # before it has printed anything
    assert process.wait(stretched(60)) == 0
    assert process.stderr is not None and process.stderr.read() == ""


def test_nothing_that_is_read_is_run(run: Path, tmp_path: Path) -> None:
    from holdfast.utils.manifest import MANIFEST_NAME, file_entries, write_manifest

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    for name in ("default/.metadata", "state/rank_00000.pt", "data.pt"):
        generation = run / "recover" / "global_step_7"
        original = (generation / name).read_bytes()
        (generation / name).write_bytes(pickle.dumps(Attack()))
        manifest = (generation / MANIFEST_NAME).read_bytes()
        (generation / MANIFEST_NAME).unlink()
        files = [
            path.relative_to(generation).as_posix()
            for path in generation.rglob("*")
            if path.is_file()
        ]
        write_manifest(generation, file_entries(generation, files), {"step": 7})
        for command in ("show", "verify", "diff"):
            holdfast(command, f"{run}@7", *([f"{run}@5"] * (command == "diff")))
        assert holdfast("show", f"{run}@7")[0] == 1 and not (tmp_path / "ran").exists()
        (generation / name).write_bytes(original)
        (generation / MANIFEST_NAME).write_bytes(manifest)
    assert holdfast("show", f"{run}@7")[0] == 0


@pytest.mark.slow
def test_ls_survives_generations_that_come_and_go_while_it_looks(run: Path, tmp_path: Path) -> None:
    """Another process commits and deletes as fast as possible."""
    script = (
        "import sys, shutil, os\n"
        "source, root = sys.argv[1:]\n"
        "step = 100\n"
        "while True:\n"
        "    target = f'{root}/global_step_{step}'\n"
        "    shutil.copytree(source, f'{root}/.staging-{step}-0')\n"
        "    os.rename(f'{root}/.staging-{step}-0', target)\n"
        "    os.rename(target, f'{root}/.retired-{step}')\n"
        "    shutil.rmtree(f'{root}/.retired-{step}')\n"
        "    step += 1\n"
    )
    root = run / "recover"
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(root / "global_step_7"), str(root)]
    )
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for command in ("ls", "top"):
                code, _, err = holdfast(command, run)
                assert code == 0, err
    finally:
        writer.kill()
        writer.wait()


def test_every_command_has_help_with_its_arguments_and_json() -> None:
    for name in _COMMANDS:
        groups = ([name, sub] for sub in ("ls", "push", "pull")) if name == "mirror" else ([name],)
        for command in groups:
            code, out, _ = holdfast(*command, "--help")
            assert code == 0 and len(out) > 200
            assert ("--json" in out) == (name != "serve"), "serve prints nothing but its log"
    assert holdfast("--version")[1].startswith("holdfast, version")


def test_bash_gets_a_completion_script() -> None:
    script = subprocess.run(
        [HOLDFAST],
        env={**os.environ, "_HOLDFAST_COMPLETE": "bash_source"},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0 and "complete" in script.stdout
    words = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": "holdfast ver", "COMP_CWORD": "1"}
    told = subprocess.run([HOLDFAST], env={**os.environ, **words}, capture_output=True, text=True)
    assert told.stdout.split() == ["plain,verify"]
    assert cli.name == "cli"
