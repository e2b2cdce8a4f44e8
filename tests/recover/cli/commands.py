"""Commands called in this process, and in a separate one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from holdfast.recover.cli.main import cli
from tests.limits import stretched

HOLDFAST = Path(sys.executable).with_name("holdfast")


def holdfast(*args: str | Path, typed: str = "") -> tuple[int, str, str]:
    """Call a command in this process. Returns exit code, stdout and stderr."""
    result = CliRunner().invoke(cli, list(map(str, args)), input=typed, prog_name="holdfast")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def answer(*args: str | Path, code: int = 0) -> Any:
    """Return the ``--json`` output of a command."""
    found, out, err = holdfast(*args, "--json")
    assert found == code, out + err
    return json.loads(out)


def start(*args: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a separate process."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    } | options
    return subprocess.Popen([str(HOLDFAST), *map(str, args)], **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=stretched(60))
    return process.returncode, out, err


def flip_byte(path: Path, at: int = -1000) -> None:
    """Flip a bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
