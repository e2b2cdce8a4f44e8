"""Calls in separate processes: results, errors, calls that hang or end their process, and cleaning
up.
"""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from holdfast.engine.rollouts import CallPool
from holdfast.utils.errors import CallLost, ConfigError
from holdfast.utils.processes import ProcessId, still_alive
from tests.engine.rollouts import user_code
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(60)


def call(pool: CallPool, fn: object, *args: object) -> object:
    return asyncio.run(pool.call(fn, *args))  # type: ignore[arg-type]


def test_a_call_returns_what_its_function_does_in_another_process() -> None:
    with CallPool(n_processes=1) as pool:
        assert call(pool, user_code.add, 1, 2) == 3
        first, second = (call(pool, user_code.process_id) for _ in range(2))
        assert first == second != os.getpid()


def test_calls_are_made_at_the_same_time() -> None:
    async def two() -> list[int]:
        return await asyncio.gather(*(pool.call(user_code.process_id) for _ in range(16)))

    with CallPool(n_processes=2) as pool:
        assert len(set(asyncio.run(two()))) <= 2


def test_an_error_of_a_function_is_raised_with_its_traceback() -> None:
    with CallPool(n_processes=1) as pool:
        with pytest.raises(ValueError, match="3 is no good") as caught:
            call(pool, user_code.refuse, 3)
        assert "in refuse" in caught.value.__notes__[0]
        with pytest.raises(RuntimeError, match="Odd: odd"):
            call(pool, user_code.raise_odd)
        assert call(pool, user_code.add, 1, 1) == 2 and pool.n_lost == 0


@pytest.mark.parametrize(
    "begin",
    [
        "from holdfast.engine import *; FSDPEngine(TrainEngineConfig()).create_process_group()",
        "from holdfast.recover.supervisor import Supervisor; Supervisor().run(print)",
    ],
)
def test_a_helper_process_that_imports_the_script_does_not_begin_its_job(
    tmp_path: Path, begin: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(begin)
    with pytest.raises(ConfigError, match='below `if __name__ == "__main__":`'):
        runpy.run_path(str(script), run_name="__mp_main__")  # as multiprocessing does


def test_a_call_that_hangs_is_ended_and_made_once_more(tmp_path: Path) -> None:
    with CallPool(n_processes=1, timeout_s=0.3) as pool:
        with pytest.raises(CallLost, match=r"hang has not returned within 0\.3 s, 2 times"):
            call(pool, user_code.hang, str(tmp_path / "started"))
        pids = [int(line) for line in (tmp_path / "started").read_text().split()]
        assert len(set(pids)) == 2 and pool.n_lost == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert call(pool, user_code.add, 1, 1) == 2, "the pool survives"


def test_programs_of_a_call_that_hangs_end_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with CallPool(n_processes=1, timeout_s=stretched(1)) as pool:
        with pytest.raises(CallLost, match="run_program has not returned within"):
            call(pool, user_code.run_program, str(started))
        programs = [ProcessId.of(int(pid)) for pid in started.read_text().split()]
        assert len(programs) == 2, "the call was made twice"
        assert still_alive(programs, stretched(10)) == []


def test_a_call_that_ends_its_process_is_made_once_more(tmp_path: Path) -> None:
    with CallPool(n_processes=1) as pool:
        assert call(pool, user_code.die_once, str(tmp_path / "died")) == "done"
        with pytest.raises(CallLost, match=r"die has ended its process \(exit code 7\), 2 times"):
            call(pool, user_code.die)
        assert pool.n_lost == 3 and call(pool, user_code.add, 1, 1) == 2


def test_processes_that_were_ended_between_two_calls_cost_no_attempt() -> None:
    async def two() -> list[int]:
        return await asyncio.gather(*(pool.call(user_code.slow_process_id) for _ in range(2)))

    with CallPool(n_processes=2) as pool:
        for _ in range(2):
            pids = set(asyncio.run(two()))
            assert len(pids) == 2
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        assert asyncio.run(pool.call_once(user_code.add, 1, 1)) == 2
        assert pool.n_lost == 0


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    with CallPool() as pool, pytest.raises(ConfigError, match="cannot be sent to another process"):
        call(pool, lambda: 1)


def test_the_lock_of_a_pool_is_free_while_a_process_is_slow_to_end() -> None:
    pool = CallPool(n_processes=1)
    call(pool, user_code.add, 1, 1)
    fork_server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(fork_server, signal.SIGSTOP)  # so that it does not notice the end of its child
    try:
        closing = threading.Thread(target=pool.close)
        closing.start()
        while not pool._closed:
            time.sleep(0.001)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < stretched(0.5)
    finally:
        os.kill(fork_server, signal.SIGCONT)
        closing.join()


def test_a_closed_pool_ends_its_calls_and_takes_none(tmp_path: Path) -> None:
    async def close_while_it_hangs() -> None:
        task = asyncio.create_task(pool.call(user_code.hang, str(tmp_path / "started")))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        pool.close()
        with pytest.raises(ConfigError, match="closed"):
            await task

    pool = CallPool(n_processes=1, timeout_s=3600)
    asyncio.run(close_while_it_hangs())
    with pytest.raises(ConfigError, match="closed"):
        call(pool, user_code.add, 1, 1)


@pytest.mark.parametrize("function", ["hang", "run_program"])
def test_a_hanging_call_ends_with_the_process_that_asked(tmp_path: Path, function: str) -> None:
    script = (
        "import asyncio, sys\nfrom holdfast.engine.rollouts import CallPool\nfrom "
        "tests.engine.rollouts import user_code\nif __name__ == '__main__':\n    "
        f"asyncio.run(CallPool(timeout_s=3600).call(user_code.{function}, sys.argv[1]))\n"
    )
    (tmp_path / "job.py").write_text(script)
    started = tmp_path / "started"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    }
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "job.py"), str(started)], env=environment
    )
    deadline = time.monotonic() + stretched(30)
    while not started.exists() or not started.read_text().endswith("\n"):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(started.read_text())
    child = ProcessId(pid, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert child.alive()
    job.kill()
    job.wait()
    assert still_alive([child], stretched(10)) == []


@pytest.mark.slow
def test_processes_are_forked_with_torch_and_holdfast_and_find_modules_next_to_the_script(
    tmp_path: Path,
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "rewards.py").write_text("raise RuntimeError('of the working folder')\n")
    (tmp_path / "scripts" / "rewards.py").write_text(
        "import sys\n\ndef loaded():\n"
        "    return {'torch', 'holdfast.recover.info'} & {*sys.modules}\n"
    )
    (tmp_path / "scripts" / "job.py").write_text(
        "import asyncio\nimport rewards\nfrom holdfast.engine.rollouts import CallPool\n"
        "if __name__ == '__main__':\n    import torch, holdfast.recover.info\n"
        "    with CallPool(n_processes=1) as pool:\n"
        "        assert len(asyncio.run(pool.call(rewards.loaded))) == 2\n"
    )
    subprocess.run([sys.executable, "scripts/job.py"], check=True, cwd=tmp_path)


def test_processes_draw_other_numbers_of_numpy() -> None:
    async def two(pool: CallPool) -> list[float]:
        calls = (pool.call(user_code.slow_number_of_numpy) for _ in range(2))
        return await asyncio.gather(*calls)

    with CallPool(n_processes=2) as pool:
        assert len(set(asyncio.run(two(pool)))) == 2
