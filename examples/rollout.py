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
        self.device = torch.device(
            "cuda" if torch.cuda.is_available() else "cpu"
        )  # a worker without GPUs of its own sees none
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
        self.model.generation_config = GenerationConfig(
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.stop_ids,
            suppress_tokens=[config.image_token_id, config.video_token_id]
            if sees
            else None,  # they stand for images
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
        padded = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.device)
        seen = None if images is None else [each for each in images for _ in range(n_samples)]
        if seen is not None:
            padded["mm_token_type_ids"] = (
                padded["input_ids"] == self.model.config.image_token_id
            ).long()
            padded |= {
                name: torch.cat([each[name] for each in seen]).to(self.device) for name in seen[0]
            }
        out = self.model.generate(
            **padded,
            **(
                {"do_sample": True, "temperature": temperature, "top_k": 0}
                if temperature
                else {"do_sample": False}
            ),
            max_new_tokens=max_new_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
        completions = out.sequences[:, padded["input_ids"].shape[1] :]
        logprobs = torch.stack([scores.float().log_softmax(-1) for scores in out.scores], dim=1)
        logprobs = logprobs.gather(-1, completions[..., None])[..., 0]
        return with_images(self._pack(rows, completions.cpu(), logprobs.cpu()), seen)

    def _pack(
        self, rows: list[list[int]], completions: torch.Tensor, logprobs: torch.Tensor
    ) -> Batch:
        stops = torch.isin(completions, torch.tensor(self.stop_ids)).long()
        lengths = (stops.cumsum(1) - stops == 0).sum(1)  # includes the stop token
        shape = (len(rows), max(len(row) for row in rows) + completions.shape[1])
        batch = {
            name: torch.zeros(shape, dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "loss_mask")
        }
        batch |= {"logprobs": torch.zeros(shape), "versions": torch.full(shape, -1)}
        for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            end = len(row) + length
            batch["input_ids"][i, :end] = torch.cat([torch.tensor(row), completions[i, :length]])
            batch["attention_mask"][i, :end] = 1
            batch["loss_mask"][i, len(row) : end] = 1
            batch["logprobs"][i, len(row) : end] = logprobs[i, :length]
            batch["versions"][i, len(row) : end] = self.version
        return {**batch, "truncated": ~stops.bool().any(1)}


def _stop_ids(tokenizer: Any, generation_config: GenerationConfig) -> list[int]:
    """Return the tokenizer's end token and others of the model folder (Qwen3's end a turn or a
    text).
    """
    also: Any = generation_config.eos_token_id
    also = [] if also is None else [also] if isinstance(also, int) else also
    return sorted({tokenizer.eos_token_id, *also})
