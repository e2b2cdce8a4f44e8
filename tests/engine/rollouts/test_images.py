"""`RLVRWorkflow` with images: what is sampled and trained on, damaged images, and ledgers without
pixels.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from holdfast.engine.rollouts import CallPool, MultiTurnWorkflow, RLVRWorkflow, RolloutExecutor
from holdfast.engine.rollouts.images import encode_prompt
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.engine.training.vision import Vision
from holdfast.utils.errors import ConfigError, RolloutError
from tests.engine.processors import END, IMAGE, START, VIDEO, make_processor, picture, served_config
from tests.engine.rollouts import user_code
from tests.engine.rollouts.servers import Server, make_executor, make_loader
from tests.engine.rollouts.test_ledger import saved

pytestmark = pytest.mark.timeout(60)

TWO = GenerationHyperparameters(n_samples=2, max_new_tokens=4)
SEES = {
    "role": "user",
    "content": [{"type": "text", "text": "w1"}, {"type": "image"}, {"type": "image"}],
}
BLIND = {"role": "user", "content": [{"type": "text", "text": "w2"}]}


class Seeing(Server):
    """Answers as a server whose processor makes the same prompt."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        assert (request.images is None) == (IMAGE not in request.input_ids)
        return await super().agenerate(request)


@pytest.fixture(scope="module")
def pool() -> Iterator[CallPool]:
    with CallPool(n_processes=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor()


@pytest.fixture
def samples(tmp_path: Path) -> list[dict[str, Any]]:
    """With two images, as a file and as bytes of different sizes, and without."""
    (tmp_path / "one.png").write_bytes(picture(1, 56, 28))
    two: dict[str, Any] = {"bytes": picture(2, 28, 84, "JPEG"), "path": "two.jpg"}
    seeing = {"messages": [SEES], "images": [str(tmp_path / "one.png"), two], "answer": 1}
    return [seeing, {"messages": [BLIND], "answer": 2}]


def make(
    samples: list[Any], processor: Any, pool: CallPool, **options: Any
) -> tuple[RolloutExecutor, Any, Seeing]:
    loader, server = make_loader(), Seeing()
    loader.dataset = samples * (24 // len(samples))
    return (
        make_executor(
            [server],
            RLVRWorkflow(user_code.any_reward, TWO, pool=pool, processor=processor),
            loader,
            **options,
        ),
        loader,
        server,
    )


def first_batch(samples: list[Any], processor: Any, pool: CallPool) -> tuple[Any, Seeing]:
    executor, _, server = make(samples, processor, pool)
    with executor:
        executor.set_version(0)
        return executor.next_batch(0), server


def test_a_batch_has_the_images_that_the_model_takes(
    samples: list[Any], processor: Any, pool: CallPool
) -> None:
    batch, server = first_batch(samples, processor, pool)
    with torch.device("meta"):
        vision = Vision(AutoModelForImageTextToText.from_config(served_config()))
    lengths = batch["attention_mask"].sum(1).tolist()
    prepared, pixels, *_ = vision.prepare(batch, lengths)
    assert torch.equal(prepared["mm_token_type_ids"], batch["mm_token_type_ids"])
    n_tokens = batch["mm_token_type_ids"].sum(1).tolist()
    assert sorted(set(n_tokens)) == [0, 5] and [bool(own) for own in pixels] == [
        n == 5 for n in n_tokens
    ]
    assert batch["image_digest"].unique().numel() == 2
    request = next(request for request in server.seen if request.images is not None)
    assert request.images is not None and request.images.forbidden == [IMAGE, VIDEO]
    assert request.input_ids == [2, 5, START, *[IMAGE] * 2, END, START, *[IMAGE] * 3, END, 3]
    assert request.images.token_ids == [2, 5, START, IMAGE, END, START, IMAGE, END, 3]


def test_a_conversation_goes_on_after_its_images(
    samples: list[Any], processor: Any, pool: CallPool
) -> None:
    server, loader, one = Seeing(), make_loader(1), GenerationHyperparameters(max_new_tokens=4)
    loader.dataset = samples[:1] * 24
    workflow = MultiTurnWorkflow(
        user_code.any_reward, user_code.say_seven, one, max_turns=2, pool=pool, processor=processor
    )
    with make_executor([server], workflow, loader) as executor:
        executor.set_version(0)
        ids = executor.next_batch(0)["input_ids"][0].tolist()
    first, second = server.seen
    assert first.images is not None and second.images is not None
    n_prompt = len(first.input_ids)
    assert ids[n_prompt + 4] == 7 and second.input_ids == ids[: n_prompt + 5]
    assert second.images.token_ids == [*first.images.token_ids, *ids[n_prompt : n_prompt + 5]]


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "turned", "JPEG"])
def test_the_server_gets_the_pixels_that_the_trainer_sees(mode: str, processor: Any) -> None:
    image, buffer, options = Image.open(BytesIO(picture(3, 56, 28))), BytesIO(), {}
    if mode == "turned":
        options["exif"] = exif = Image.Exif()
        exif[0x0112] = 6  # a quarter turn
    elif mode != "JPEG":
        image = image.convert(mode)
    image.save(buffer, "JPEG" if mode == "JPEG" else "PNG", **options)
    data = {
        "messages": [{"role": "user", "content": [{"type": "image"}]}],
        "images": [buffer.getvalue()],
    }
    prompt = encode_prompt(processor, data)
    assert prompt.images is not None
    sent = Image.open(BytesIO(prompt.images.files[0]))
    assert (
        sent.mode == "RGB"
        and sent.format == "PNG"
        and sent.size == ((28, 56) if mode == "turned" else (56, 28))
    )
    again = processor.image_processor([sent], return_tensors="pt")
    assert torch.equal(again["pixel_values"], prompt.pixels["pixel_values"])


def damage(sample: dict[str, Any], how: str) -> str:
    """Damage the first image, and return the expected message."""
    path = Path(sample["images"][0])
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:300])
        return "one.png is damaged or no image: "
    if how == "no image":
        path.write_text("<html>")
        return "one.png is damaged or no image: cannot identify image file"
    if how == "missing":
        path.unlink()
        return r"image .*one.png cannot be read: \[Errno 2\]"
    if how == "decoded":
        sample["images"][0] = Image.open(path)
        return (
            r"image 0 of the sample is a PngImageFile; expected a path or the bytes of a file "
            r"\(cast"
        )
    if how == "a line":
        path.write_bytes(picture(1, 6000, 28))
        return (
            "ImageProcessor refuses 'user w1 .*' with 2 image.*: absolute aspect ratio must be "
            "smaller than 200"
        )
    sample["images"] = {"one too few": [path], "one too many": [path] * 3}[how]
    return r"the messages show 2 image\(s\), the sample has [13]: \["


@pytest.mark.parametrize(
    "how", ["cut off", "no image", "missing", "decoded", "one too few", "one too many", "a line"]
)
def test_a_bad_image_ends_the_wait_at_once(
    how: str, samples: list[Any], processor: Any, pool: CallPool
) -> None:
    message = damage(samples[0], how)
    with pytest.raises(
        RolloutError, match=rf"ticket \d of step 0 \(dataset index \d+\) .*PromptError: .*{message}"
    ):
        first_batch(samples[:1], processor, pool)


def test_a_processor_without_images_and_a_sample_without_messages_are_named(
    processor: Any, pool: CallPool
) -> None:
    with pytest.raises(RolloutError, match=r"the sample has no 'messages'; it has \['text'\]"):
        first_batch([{"text": "w1"}], processor, pool)
    with pytest.raises(ConfigError, match="has no image_token_id; give the processor"):
        encode_prompt(processor.tokenizer, {"messages": []})


def resumed(state: Any, samples: list[Any], processor: Any, pool: CallPool) -> Any:
    """The first batch of an executor with a restored state. It samples nothing."""
    executor, loader, server = make(samples, processor, pool)
    with executor:
        loader.load_state_dict(state[1])
        executor.load_state_dict(state[0])
        assert executor.state_dict()["tickets"] == state[0]["tickets"] or processor is None
        executor.set_version(0)
        batch = executor.next_batch(0)
        assert not server.seen
        return batch


def test_a_ledger_keeps_no_pixels_and_restores_them_bit_by_bit(
    samples: list[Any], processor: Any, pool: CallPool
) -> None:
    executor, loader, _ = make(samples, processor, pool)
    with executor:
        executor.set_version(0)
        batch: Any = executor.next_batch(0)
        state = saved(executor, loader)
    assert all("multi_modal_input" not in ticket["trajectory"] for ticket in state[0]["tickets"])
    again = resumed(state, samples, make_processor(), pool)
    assert again.keys() == batch.keys()
    for name in batch.keys() - {"multi_modal_input"}:
        assert torch.equal(again[name], batch[name])
    for ours, theirs in zip(again["multi_modal_input"], batch["multi_modal_input"], strict=True):
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )

    with pytest.raises(
        RolloutError, match=r"cannot be restored: the processor makes another prompt of its 2 image"
    ):
        resumed(state, samples, make_processor(max_pixels=28 * 28), pool)
    with pytest.raises(
        ConfigError, match="were sampled with images; give the workflow its processor"
    ):
        resumed(state, samples, None, pool)
    path = Path(samples[0]["images"][0])
    path.write_bytes(picture(4, 56, 28))
    changed = (
        r"ticket \d of step 0 \(dataset index \d+\) cannot be restored: its 2 image\(s\) "
        rf".*{path}.* have changed"
    )
    with pytest.raises(RolloutError, match=changed):
        resumed(state, samples, processor, pool)
    path.unlink()
    with pytest.raises(RolloutError, match=rf"cannot be restored: image {path} cannot be read"):
        resumed(state, samples, processor, pool)
