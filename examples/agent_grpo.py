"""GRPO of an agent that asks a database and places orders, and is killed without asking or ordering
twice.

    torchrun --nproc_per_node=2 examples/agent_grpo.py server=http://127.0.0.1:8000

The model is shown an item. It may query prices in a SQLite database, turn by turn, and answers in
its last turn. A right answer places an order, which must happen once: `engine.call` with ``once``
writes down that the order begins before it is placed. After a kill the same command goes on. The
workflow runs again from its start, and gets the recorded answers, prices and orders. The server is
started as for `minimal_grpo.py`.
"""

import asyncio
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.distributed import get_rank
from transformers import AutoTokenizer

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    OptimizerConfig,
    VLLMServer,
    WeightUpdateMeta,
)
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig
from holdfast.engine.rollouts import (
    CallPool,
    EpisodeEngine,
    GenerationHyperparameters,
    ModelRequest,
    RolloutConfig,
    RolloutExecutor,
    SharedRollouts,
    TokenSequence,
    Trajectory,
    to_trajectory,
)
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.errors import CallLost

N_ITEMS = 10


@dataclass
class Config:
    """Options of the job, each ``name=value`` on the command line."""

    model: str = "Qwen/Qwen3-0.6B"
    """A folder or an id on the hub, the one that the server was started with."""
    server: str = "http://127.0.0.1:8000"
    fileroot: str = "runs/agent_grpo"
    """Folder for the database, snapshots and published weights. The server reads it, too."""
    dtype: str = "bfloat16"
    lr: float = 1e-6
    epochs: int = 20
    batch_size: int = 5
    """Prompts per step."""
    n_samples: int = 8
    """Conversations per prompt."""
    max_turns: int = 3
    """Answers of the model per conversation. All but the last one are queries."""
    max_new_tokens: int = 64
    steps_ahead: int = 1
    """Steps that sampling runs ahead of training."""
    freq_steps: int = 10
    """Steps between two snapshots."""


def make_shop(path: str) -> None:
    """Create the database if it is not there: prices, and the orders of all times."""
    with opened(path) as shop:
        shop.execute("CREATE TABLE IF NOT EXISTS prices (item INTEGER PRIMARY KEY, price INTEGER)")
        shop.execute("CREATE TABLE IF NOT EXISTS orders (name TEXT, item INTEGER)")
        for item in range(N_ITEMS):
            row = (item, price_of(item))
            shop.execute("INSERT OR IGNORE INTO prices VALUES (?, ?)", row)


def price_of(item: int) -> int:
    """The right answer."""
    return 7 * item % N_ITEMS


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """Open the database, and commit at the end of the block."""
    with closing(sqlite3.connect(path, timeout=30)) as shop, shop:
        yield shop


def query(path: str, text: str) -> str:
    """Look up the last number in a text. A tool that may be called again."""
    numbers = re.findall("[0-9]", text)  # the database knows no digits of other scripts
    if not numbers:
        return "="
    with opened(path) as shop:
        found = shop.execute("SELECT price FROM prices WHERE item = ?", numbers[-1:])
        (price,) = found.fetchone()
    return f"={price}+"


def order(path: str, name: str, item: int) -> int:
    """Place an order, and return its number. It must not be called twice."""
    with opened(path) as shop:
        placed = shop.execute("INSERT INTO orders VALUES (?, ?)", (name, item))
        return placed.lastrowid or 0


class ShopWorkflow:
    """Conversations of one prompt. Tools run in a pool, so that a slow query holds up nothing."""

    def __init__(self, config: Config, tokenizer: Any, shop: str) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._shop = shop
        self._pool = CallPool(2)
        self._sampling = GenerationHyperparameters(
            max_new_tokens=config.max_new_tokens, stop_token_ids=[tokenizer.eos_token_id]
        )

    async def arun_episode(self, engine: EpisodeEngine, data: Mapping[str, Any]) -> Trajectory:
        """See `RolloutWorkflow`."""
        numbers = range(self._config.n_samples)
        visits = [self._visit(engine, data, number) for number in numbers]
        samples = await asyncio.gather(*visits)
        sequences = [sequence for sequence, _ in samples]
        rewards = [reward for _, reward in samples]
        return to_trajectory(sequences, rewards)

    async def _visit(
        self,
        engine: EpisodeEngine,
        data: Mapping[str, Any],
        number: int,
    ) -> tuple[TokenSequence, float]:
        sequence = TokenSequence()
        sequence.extend_given(self._encode(f"{data['item']}="))
        text = ""
        last = self._config.max_turns - 1
        for turn in range(last + 1):
            request = ModelRequest(list(sequence.input_ids), self._sampling)
            response = await engine.agenerate(request)
            sequence.extend_sampled(response)
            text = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            if turn < last:
                # a query may be made again, so that `call` alone is enough
                said = await engine.call(self._pool.call, query, self._shop, text)
                sequence.extend_given(self._encode(said))

        # The last answer should begin with the price.
        item = data["item"]
        right = text.startswith(str(price_of(item)))
        if right:
            name = f"{engine}, sample {number}"
            await self._order(engine, name, item)
        return sequence, float(right)

    async def _order(self, engine: EpisodeEngine, name: str, item: int) -> None:
        try:
            await engine.call(self._pool.call_once, order, self._shop, name, item, once=True)
        except CallLost as error:
            # A kill came between the intent and the result. The orders show what happened.
            print(f"{name}: {error}", flush=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def main(config: Config) -> None:
    """Train on this rank."""
    dataset = [{"item": item} for item in range(N_ITEMS)]
    spec = FinetuneSpec(config.epochs, len(dataset), config.batch_size)
    tokenizer = AutoTokenizer.from_pretrained(config.model)

    # The policy: a model in shards on all ranks, and the loss of GRPO.
    actor_config = PPOActorConfig(
        path=config.model,
        dtype=config.dtype,
        optimizer=OptimizerConfig(lr=config.lr),
        group_size=config.n_samples,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
    )
    engine = FSDPEngine(actor_config)
    engine.create_process_group()
    engine.initialize(None, spec)
    actor = PPOActor(actor_config, engine)

    # Rank 0 has the conversations, and the database is beside the snapshots.
    servers = [VLLMServer(config.server)]
    engine.connect_engine(servers, WeightUpdateMeta("disk", f"{config.fileroot}/weights"))
    loader = ResumableDataLoader(dataset, config.batch_size, seed=1)
    ahead = RolloutConfig(config.steps_ahead, total_steps=spec.total_train_steps)

    def make_executor() -> RolloutExecutor:
        Path(config.fileroot).mkdir(parents=True, exist_ok=True)
        shop = f"{config.fileroot}/shop.sqlite"
        make_shop(shop)
        return RolloutExecutor(ahead, loader, ShopWorkflow(config, tokenizer, shop), servers)

    rollouts = SharedRollouts(make_executor, engine)

    # Recovery: with the generations comes the log of answers and calls since the newest one.
    recover = RecoverConfig(fileroot=config.fileroot, freq_steps=config.freq_steps)
    with closing(rollouts), RecoverHandler(recover, spec, group=engine.control_group) as handler:
        handler.register("rollouts", rollouts)
        step = handler.first_step(handler.load(engine, dataloader=loader))
        while step.global_step < spec.total_train_steps:
            engine.update_weights()
            rollouts.set_version(step.global_step)
            batch = rollouts.next_batch(step.global_step)
            stats = actor.ppo_update(actor.compute_advantages(batch))
            engine.step_lr_scheduler()
            engine.set_version(step.global_step + 1)
            handler.dump(engine, step, dataloader=loader)
            figures = rollouts.stats()
            if get_rank() == 0:
                reward = f"reward {stats['reward']:.3f}"
                replayed = f"{figures['rollouts/replayed']:.0f} answers from records"
                print(f"step {step.global_step}: {reward}, {replayed}", flush=True)
            step = step.next()
    engine.destroy()


if __name__ == "__main__":
    given = OmegaConf.from_cli(sys.argv[1:])
    main(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given)))  # type: ignore
