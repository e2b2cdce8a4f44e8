"""GRPO with two real vLLM servers whose processes are killed at random moments."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.engine import FinetuneSpec, FSDPEngine, OptimizerConfig, WeightUpdateMeta
from holdfast.engine.launch import ServerProcesses, WatchLimits
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig
from holdfast.engine.rollouts import EpisodeEngine, RolloutConfig, RolloutExecutor, Trajectory
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers import ModelRequest, ServerFleet
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.recover import ResumableDataLoader
from tests.limits import stretched, wait_until
from tests.live.trainer import TOLERANCE, folder_logprobs
from tests.live_vllm.test_launch import GONE_S, START_S, Tree, spec_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

STEPS = 60
BATCH_SIZE = 4
N_SAMPLES = 4
MAX_NEW_TOKENS = 40
AHEAD = 1
PROMPTS = [[3 + n, 5, 40 - n] for n in range(20)]
TRAINS_S = 6.0
"""Seconds that a step of a larger model takes, in which servers start again."""
N_SERVERS = 2
VICTIMS = ("guard", "api", "EngineCore", "Worker")
PAUSE_S = (3.0, 30.0)
"""Bounds of the seconds before a kill."""


class EvenTokens:
    """Samples a group of completions. The reward is the share of even tokens."""

    async def arun_episode(self, engine: EpisodeEngine, data: list[int]) -> Trajectory:
        sequences = []
        for _ in range(N_SAMPLES):
            sequence = TokenSequence()
            sequence.extend_given(data)
            options = GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS)
            sequence.extend_sampled(await engine.agenerate(ModelRequest(list(data), options)))
            sequences.append(sequence)
        sampled = [sequence.input_ids[len(data) :] for sequence in sequences]
        rewards = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in sampled]
        return to_trajectory(sequences, rewards)


class Trained(NamedTuple):
    """A sample that was trained."""

    step: int
    ticket: int
    trajectory: Trajectory


class Killer:
    """Kills processes of servers at random moments of a run: any process of a server that serves or
    starts, and now and then one of each server.

    Args:
        servers: whose processes.
        fleet: says which servers serve.

    Attributes:
        trees: processes of the servers whose process was killed, at that time.
        serving_again_s: seconds from a kill, or the first of several, until all servers serve.
    """

    def __init__(self, servers: ServerProcesses, fleet: ServerFleet) -> None:
        self._servers, self._fleet = servers, fleet
        self._draw = random.Random(7)
        self._ended = threading.Event()
        self.trees: list[Tree] = []
        self.serving_again_s: list[float] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Kill in the block."""
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(self._run)
            try:
                yield
            finally:
                self._ended.set()
            killing.result()

    def _run(self) -> None:
        for number in itertools.count():
            if self._ended.wait(self._draw.uniform(*PAUSE_S)):
                return
            began = time.monotonic()
            self._kill_some(both=number % 3 == 2)

            # Now and then a server is killed while it, or the other one, starts.
            if number % 2 == 1:
                if self._ended.wait(self._draw.uniform(*PAUSE_S)):
                    return
                self._kill_some(both=False)

            # Faster kills would leave no time in which a server serves.
            while not self._all_serve():
                if self._ended.wait(0.1):
                    return
            self.serving_again_s.append(time.monotonic() - began)
            print(f"all servers serve after {self.serving_again_s[-1]:.1f} s", flush=True)

    def _kill_some(self, both: bool) -> None:
        names = sorted(self._servers.pids())
        for name in names if both else self._draw.sample(names, min(1, len(names))):
            # A server that starts does not have all its processes, and one ends at any time.
            with suppress(ProcessLookupError, FileNotFoundError, KeyError, ValueError):
                self._kill(name)

    def _kill(self, name: str) -> None:
        tree = Tree(os.getpgid(self._servers.pids()[name]))
        who = self._draw.choice(VICTIMS)
        n_serving = len(self._fleet.serving())
        os.kill(tree.find(who), signal.SIGKILL)
        self.trees.append(tree)
        print(f"SIGKILL to the {who} of {name}, {n_serving} servers serve", flush=True)

    def _all_serve(self) -> bool:
        """Whether all servers that were killed are gone, and new ones serve in their place."""
        up = {client.url for client in self._servers.servers()}
        serving = {client.url for client in self._fleet.serving()}
        return len(up) == N_SERVERS and serving == up and all(tree.gone() for tree in self.trees)


def test_killed_servers_cost_a_run_of_sixty_steps_no_ticket(
    model_folder: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    trained: list[Trained] = []
    weights = tmp_path / "weights"
    limits = WatchLimits(max_restarts=50, hang_timeout_s=30.0, stop_timeout_s=5.0)
    spec = FinetuneSpec(100, len(PROMPTS), BATCH_SIZE)
    config = PPOActorConfig(
        path=str(model_folder),
        dtype="float32",
        optimizer=OptimizerConfig(lr=3e-3),
        group_size=N_SAMPLES,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    servers = ServerProcesses(spec_of(model_folder), N_SERVERS, tmp_path / "servers", limits=limits)
    with servers, closing(ServerFleet(servers, probe_interval_s=0.5)) as fleet:
        engine.initialize(None, spec)
        actor = PPOActor(config, engine)
        servers.wait_until_up(stretched(START_S))
        meta = WeightUpdateMeta("disk", str(weights), keep=STEPS + 2, timeout_s=stretched(120))
        engine.connect_engine(fleet, meta)
        loader = ResumableDataLoader(PROMPTS, BATCH_SIZE, seed=5)
        ahead = RolloutConfig(AHEAD, total_steps=STEPS, batch_timeout_s=stretched(START_S))
        killer = Killer(servers, fleet)
        with RolloutExecutor(ahead, loader, EvenTokens(), fleet) as rollouts, killer.at_work():
            for step in range(STEPS):
                began = time.monotonic()
                engine.update_weights()
                rollouts.set_version(step)
                batch = rollouts.next_batch(step)
                for ticket, trajectory in rollouts.next_trajectories(step):
                    trained.append(Trained(step, ticket.number, trajectory))
                time.sleep(TRAINS_S)
                stats: dict[str, Any] = actor.ppo_update(actor.compute_advantages(batch))
                engine.step_lr_scheduler()
                engine.set_version(step + 1)
                print(
                    f"step {step}: {time.monotonic() - began:.1f} s, reward {stats['reward']:.3f}",
                    flush=True,
                )
    engine.destroy()

    # Every kill hit a process, and nothing is left of it.
    assert len(killer.trees) >= 5
    wait_until(lambda: all(tree.gone() for tree in killer.trees), GONE_S)

    # Every ticket is trained once, in its order, by tokens that are young enough.
    assert [each.ticket for each in trained] == list(range(STEPS * BATCH_SIZE))
    for each in trained:
        sampled = each.trajectory["versions"][each.trajectory["loss_mask"].bool()]
        assert each.step - AHEAD <= sampled.min() and sampled.max() <= each.step

    # Each token has the log-probability of the version that is said to have sampled it.
    errors = [error for each in trained for error in errors_of(weights, each.trajectory)]
    print(
        f"{len(killer.trees)} kills, serving again after {killer.serving_again_s}, "
        f"{len(errors)} completions, largest error {max(errors):.1e}"
    )
    assert all(error < TOLERANCE for error in errors)


def errors_of(weights: Path, trajectory: Trajectory) -> Iterator[float]:
    """Largest error of each completion's log-probabilities."""
    names = ("input_ids", "loss_mask", "logprobs", "versions")
    for ids, mask, logprobs, versions in zip(*(trajectory[name] for name in names), strict=True):
        sampled = mask.bool()
        assert sampled.any()
        differences = torch.full_like(logprobs, torch.nan)
        for version in set(versions[sampled].tolist()):
            expected = torch.tensor(folder_logprobs(weights / f"v{version:08d}", ids.tolist()))
            theirs = sampled & (versions == version)
            differences[theirs] = (logprobs - expected)[theirs].abs()
        # NaN, if a log-probability is.
        yield differences[sampled].max().item()
