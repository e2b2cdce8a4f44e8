"""Rollout worker: a process that samples completions with the last published weights.

It takes the place of an inference server (vLLM, SGLang): it never sees the trainer's memory, loads
a version when told to, and reports which one it serves. The caller gives the seed, so a repeated
step samples the same completions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils.logging import disable_progress_bar

from holdfast.engine.api import Batch
from holdfast.engine.training.batch import with_images
from holdfast.utils.logging import configure_logging


class RolloutWorker:
    """Serves one policy: an `holdfast.engine.InferenceServer` that also has the method `generate`.

    Args:
        tokenizer_path: folder of the model's tokenizer.
        log_level: log level of this process.
    """

    def __init__(self, tokenizer_path: str, log_level: str = "WARNING") -> None:
        configure_logging(log_level)
        disable_progress_bar()  # otherwise there is a bar for every version
        # A worker without GPUs of its own sees none.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(kind)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, padding_side="left")
        self.model: Any = None
        self.stop_ids: list[int] = []
        self.version = -1

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Load a published folder and serve it from now on."""
        config = AutoConfig.from_pretrained(path)
        sees = hasattr(config, "vision_config")
        factory: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = factory.from_pretrained(path, dtype=torch.float32)
        self.model = model.to(self.device).eval()
        self.stop_ids = _stop_ids(self.tokenizer, self.model.generation_config)

        # The folder's own generation config may cut the distribution (top_p ...), so that
        # log-probabilities would differ from the trainer's.
        placeholders = None
        if sees:
            placeholders = [config.image_token_id, config.video_token_id]
        self.model.generation_config = GenerationConfig(
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.stop_ids,
            suppress_tokens=placeholders,
        )
        self.version = version
        return version

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        n_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        images: Sequence[Batch] | None = None,
    ) -> Batch:
        """Sample ``n_samples`` completions of each prompt, or greedy ones at temperature 0.

        ``images`` are the processor's tensors for the image of each prompt, and become the entry
        `IMAGES` of the batch.

        Returns:
            Right-padded ``[B, S]`` tensors on the CPU with B = prompts x samples rows, samples of a
            prompt next to each other: ``input_ids``, ``attention_mask``, ``loss_mask`` (1 on
            sampled tokens), ``logprobs`` of the sampled tokens at ``temperature``, and
            ``versions``, the weight version of each sampled token (-1 on the prompt). Also
            ``truncated``, ``[B]`` bool: whether the completion was cut off.
        """
        if self.model is None:
            raise RuntimeError("no weights were published to this rollout worker yet")
        torch.manual_seed(seed)
        rows = [prompt for prompt in prompts for _ in range(n_samples)]
        padded = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        padded = padded.to(self.device)
        input_ids = padded["input_ids"]

        # A row has the images of its prompt.
        seen = None
        if images is not None:
            seen = [each for each in images for _ in range(n_samples)]
            is_image = input_ids == self.model.config.image_token_id
            padded["mm_token_type_ids"] = is_image.long()
            for name in seen[0]:
                joined = torch.cat([each[name] for each in seen])
                padded[name] = joined.to(self.device)

        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_k": 0,
            }
        out = self.model.generate(
            **padded,
            **sampling,
            max_new_tokens=max_new_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )

        # The scores are the logits of each new token, divided by the temperature. They are large,
        # so that the log-probabilities of all words exist for one position at a time.
        completions = out.sequences[:, input_ids.shape[1] :]
        by_position = []
        for position, scores in enumerate(out.scores):
            of_words = scores.float().log_softmax(-1)
            sampled = completions[:, position, None]
            by_position.append(of_words.gather(-1, sampled)[:, 0])
        logprobs = torch.stack(by_position, dim=1)

        batch = self._pack(rows, completions.cpu(), logprobs.cpu())
        return with_images(batch, seen)

    def _pack(
        self,
        rows: list[list[int]],
        completions: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> Batch:
        # A completion is the tokens before which no stop token was sampled.
        is_stop = torch.isin(completions, torch.tensor(self.stop_ids))
        stops = is_stop.long()
        n_stops_before = stops.cumsum(1) - stops
        lengths = (n_stops_before == 0).sum(1)

        longest = max(len(row) for row in rows)
        shape = (len(rows), longest + completions.shape[1])
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape, dtype=torch.int64),
            "logprobs": torch.zeros(shape),
            "versions": torch.full(shape, -1),
            "truncated": ~is_stop.any(1),
        }

        # Each row is its prompt, then its completion.
        for i, length in enumerate(lengths.tolist()):
            row = rows[i]
            start = len(row)
            end = start + length
            batch["input_ids"][i, :start] = torch.tensor(row)
            batch["input_ids"][i, start:end] = completions[i, :length]
            batch["attention_mask"][i, :end] = 1
            batch["loss_mask"][i, start:end] = 1
            batch["logprobs"][i, start:end] = logprobs[i, :length]
            batch["versions"][i, start:end] = self.version
        return batch


def _stop_ids(tokenizer: Any, generation_config: GenerationConfig) -> list[int]:
    """Return the tokenizer's end token and others of the model folder (Qwen3's end a turn or a
    text).
    """
    ids = {tokenizer.eos_token_id}
    also: Any = generation_config.eos_token_id
    if isinstance(also, int):
        ids.add(also)
    elif also is not None:
        ids.update(also)
    return sorted(ids)
