"""`ServerClient`: base class of the vLLM and SGLang clients. It owns the settings and the checks
that both share.

The clients trust no server: after each update they compare log-probabilities with the trainer's,
and they check a prompt before they send it. The subclasses hold the HTTP calls of one kind of
server each.
"""

import asyncio
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar

from ...utils.config import require_at_least, require_choice
from ...utils.errors import (
    BusyServerError,
    CheckpointError,
    ConfigError,
    PromptError,
    PublishError,
    ServerError,
    SlowServerError,
    UnreachableServerError,
    WrongContentError,
)
from ...utils.logging import get_logger
from ...utils.remote import without_secrets
from ..hf.adapter_folder import WEIGHTS
from ..hf.versions import published_file
from .adapters import (
    AdaptersInUse,
    adapter_label,
    adapter_name,
    amplified,
    explained_wait,
    read_facts,
)
from .api import (
    TAGS,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ServerStatus,
    labelled_version,
    weights_label,
)
from .completions import (
    PromptLimits,
    check_images,
    folder_vocab_size,
    samples_plainly,
    stated_limits,
    temperature_error,
)
from .content_check import (
    DTYPES,
    CheckedAnswer,
    ExpectedAnswer,
    content_problem,
    effect_problem,
    expected_answer,
    read_weights_probe,
    weights_differ,
)
from .groups import KeptGroup
from .http import Calls, Connections, Json, readable, require_key, require_server_url
from .prompts import shown_prompt
from .routes import START, with_routes
from .server_calls import Sleep, SleepingCalls
from .stream import BucketReader

logger = get_logger(__name__)

NO_LABEL = "default"
"""Label of a server that has just been started."""
MIRROR_TOKEN = "HOLDFAST_WEIGHTS_TOKEN"
"""Environment variable with the token that a mirror of weights asks for."""
_UPDATE_TIMEOUT_S = 300.0
_SHA256_OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb924"
_AMPLIFIED = (8.0, 2048.0)
"""Sizes of what amplified adapters add to a layer, whose own output has about size 1. The second is
for odd models.
"""
_WITHDRAW_LIMIT_S = 10.0  # a limit separate from the update's, which may be used up by then
_NOT_PREPARED = "the server was not told, and goes on with the weights it has"
_PAUSED = "It was paused again: tell it again, or restart it"
_UNLOADED = (
    "They were unloaded again, and it goes on with those before: tell it again, or restart it "
    "with the base model that is trained"
)


@dataclass(eq=False, repr=False)
class ServerClient(SleepingCalls):
    """A client of one server. `VLLMServer` and `SGLangServer` describe the attributes. Pickling
    keeps only these. ``connections`` has the requests in flight.

    ConfigError if ``url`` is no HTTP URL of a host, has a query, or holds a user although
    ``api_key`` is given, if a limit is not positive, or ``dtype`` is unknown. The same for the URL
    of the ``mirror``. A key or token must be printable ASCII without white space.
    """

    checks_content: ClassVar[bool] = True
    """The client needs a `WeightsProbe` in the published folders."""
    _how_to_temper: ClassVar[str]
    """How to start the server so that its log-probabilities take the temperature into account."""
    _kept_free: ClassVar[int] = 0
    """Tokens of its context that the server keeps free, besides the first of a completion."""
    _no_memory_for: ClassVar[str | None] = None
    """Words of a server that has too little memory for a prompt, although it fits the context."""
    _key_advice: ClassVar[str] = ""
    """Remedy if the server refuses a request that needs only the key."""

    url: str
    _: KW_ONLY
    api_key: str | None = None
    timeout_s: float | None = None
    status_timeout_s: float = 10.0
    generation_timeout_s: float = 1800.0
    dtype: str | None = None
    mirror: str | None = None
    served_name: str | None = None

    def __post_init__(self) -> None:
        # The settings.
        self.url = self.url.rstrip("/")
        require_server_url("server", self.url)
        require_key(f"api_key of {self.name}", self.api_key)
        if self.mirror is not None:
            self.mirror = self.mirror.rstrip("/")
            require_server_url("mirror", self.mirror)
            require_key(MIRROR_TOKEN, os.environ.get(MIRROR_TOKEN))
        host_and_user, *_ = self.url.partition("://")[2].partition("/")
        if self.api_key and "@" in host_and_user:
            raise ConfigError(
                f"{self.name} is given with a user and with an api_key, but one header carries both"
            )
        require_at_least(self, timeout_s=1e-3, status_timeout_s=1e-3, generation_timeout_s=1e-3)
        require_choice("dtype", self.dtype, (None, *DTYPES))

        # Updates, one at a time.
        self._seconds: Mapping[str, float] = {}
        self._updating = Lock()
        self._allowed_s = _UPDATE_TIMEOUT_S
        self._group = KeptGroup()

        # Results of the content checks so far, and warnings that are logged once.
        self._checked: CheckedAnswer | None = None
        self._summed: CheckedAnswer | None = None
        self._sums = ""  # the checksums that the server's weights had then
        self._changes_weights = False  # whether this server has shown it, in 16 bits
        self._uses_adapters = False  # the same for adapters
        self._warned: set[str] = set()

        # Completions.
        self.connections = Connections(self.url, self.api_key)
        self._adapters = AdaptersInUse()
        self._vocab_size: int | None = None
        self._limits: PromptLimits | None = None

    def __reduce__(self) -> tuple[partial["ServerClient"], tuple[()]]:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return partial(type(self), **settings), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """URL of the server, without secrets."""
        return without_secrets(self.url)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the last update."""
        return self._seconds

    def allow(self, timeout_s: float) -> None:
        """Limit later updates to ``timeout_s``, unless the client has a ``timeout_s`` already."""
        self._allowed_s = timeout_s

    def status(self) -> ServerStatus:
        """Ask the server which weights it serves, or raise ServerError.

        The label names adapters if the server still has the adapters that this client loaded last.
        """
        with self._calls("", self.status_timeout_s, ServerError) as calls:
            self._require_name(calls)
            status = self._status(calls)
            name = self._adapters.current
            if status.label is not None or status.asleep or name is None:
                return status

            # The base answers no requests, as long as the adapters are there.
            if name in self._loaded_adapters(calls):
                return replace(status, label=adapter_label(name))
            return status

    def _status(self, calls: Calls) -> ServerStatus:
        asleep = Sleep.read(self._label(calls))
        sleeps = bool(asleep.tags)
        paused = self._is_paused(calls)
        self._sleeps = sleeps

        # The name that a server gives its weights at its start says nothing.
        label: str | None = asleep.weights
        if labelled_version(label) is None:
            label = None
        return ServerStatus(label, paused or sleeps, asleep.tags)

    # Updates

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Load the published folder ``path`` and verify that the server serves it. Returns
        ``version``.

        With a ``mirror``, the mirror first makes a folder with the same contents for the server. If
        that fails, the server is not told.

        Raises:
            UnreachableServerError: the server could not be reached, or the connection broke.
            SlowServerError: the update exceeded ``timeout_s``.
            PoisonedServerError: the load failed. The server stays paused until a load succeeds.
            WrongContentError: other weights answered. The server was paused again.
            PublishError: the server refused or reports another state, and may be paused. A refusal
                of the plugin leaves it as it was.
        """
        self._group.drop()  # a server that loads a folder may have been restarted

        with self._checked_update(path, version) as (calls, label):
            folder = self._folder_to_load(calls, os.fspath(path), version, label)
            self._load_weights(calls, folder, label)
        return version

    def _folder_to_load(self, calls: Calls, path: str, version: int, label: str) -> str:
        """The published folder, or the one that the mirror makes of it while the server answers
        requests. PublishError if the mirror cannot make the version.
        """
        if self.mirror is None:
            return path
        told = calls.post(
            "prepare",
            f"{self.mirror}/prepare",
            {"version": version, "label": label},
            key=os.environ.get(MIRROR_TOKEN),
            advice=_NOT_PREPARED,
        )
        folder = told.get("path")
        if not isinstance(folder, str):
            raise calls.refuse(
                f"its mirror says that the weights are in {folder!r}; {_NOT_PREPARED}"
            )
        return folder

    def update_weights_from_distributed(
        self, path: str, version: int, buckets: BucketReader
    ) -> int:
        """Receive the weights that the folder ``path`` describes. Errors after the first bucket
        poison the server.
        """
        with self._checked_update(path, version) as (calls, label):
            serving = self._status(calls).label
            form = partial(self._form_group, calls, buckets)
            with self._group.open(label, serving, form, buckets, calls) as group:
                self._send_weights(group, buckets, calls, label)
        return version

    @contextmanager
    def _checked_update(self, path: str, version: int) -> Iterator[tuple[Calls, str]]:
        """Replace the weights in this block, which gets their label, and check what the server
        answers then.
        """
        if (Path(path) / WEIGHTS).exists():
            raise PublishError(
                f"{path} holds adapters alone; tell servers of it by update_adapters_from_disk"
            )
        label, expected = self._read_published(path, version)
        with self._update(path, version) as calls:
            # Asked before the load, which may replace the label of a restarted server.
            must_show_change = self._must_show_change(calls, expected)
            yield calls, label

            # The server must say that it serves the weights, and answer by them.
            status = self._status(calls)
            if status != ServerStatus(label, paused=False):
                raise self._withdrawn(
                    calls,
                    f"after it, the server says {status}; expected the label {label}, not paused. "
                    "If another job publishes to it, nobody knows whose weights it has",
                )
            self._check_content(calls, expected, must_show_change=must_show_change)

            # From now on the new weights answer new requests.
            if self._adapters.current is not None:
                self._adapters.switch(None)
                self._retire(calls)

    def update_adapters_from_disk(self, path: str, version: int) -> int:
        """Load the adapters in ``path``, verify them, and use them for new requests. Returns
        ``version``.

        Requests in flight keep their adapters, so nothing is paused. After an error the server
        continues as before.

        Raises:
            UnreachableServerError: the server could not be reached, or the connection broke.
            SlowServerError: the update exceeded ``timeout_s``.
            WrongContentError: the server answers with other adapters or on another base. They were
                unloaded again.
            PublishError: the server takes no adapters, or not these ones. Or it is paused, or its
                base was replaced.
        """
        label, expected = self._read_published(path, version)
        name = adapter_name(label)
        with self._update(path, version) as calls:
            # The server must be able to use adapters, and to use them rightly.
            self._require_base(calls)
            self._require_room(calls, read_facts(path))
            loaded = self._loaded_adapters(calls)
            self._require_effect(calls, path, expected, name, loaded)

            # Load them, unless an earlier update did and ended before it could say so.
            if name not in loaded:
                self._load_adapter(calls, name, os.fspath(path))
                loaded = self._loaded_adapters(calls)
                if name not in loaded:
                    raise calls.refuse(
                        f"after it, the server lists the adapters {loaded}; expected {name}"
                    )
            with explained_wait():
                self._check_content(calls, expected, name)

            # From now on they answer new requests.
            self._adapters.switch(name, os.fspath(path))
            self._retire(calls)
        return version

    def folders_in_use(self) -> set[str]:
        """Folders of adapters that the server may read again, for requests of any time."""
        return self._adapters.folders()

    # Sleep

    def sleep(self, level: int = 1) -> None:
        """Have the server free the memory of its weights and its KV cache.

        Requests in flight wait. They go on when the server wakes up, and the weights of then
        compute their caches. A server that sleeps stays asleep.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them, so that the server needs an
                update to wake up. SGLang decides this at its start
                (``--enable-weights-cpu-backup``).

        Raises:
            ServerError: the server could not be reached, or does not sleep. The message says how to
                start it.
            SlowServerError: it did not sleep in time.
        """
        require_choice("level", level, (1, 2))
        with self._exclusive(", told to sleep", ServerError) as calls:
            self._fall_asleep(calls, level)

    def wake_up(self, tags: Collection[str] = TAGS) -> None:
        """Have the server take memory back. With its KV cache it goes on with requests, by the
        weights it had.

        An update of the weights wakes the whole server, the weights first and the KV cache after
        the load. So wake only the weights before one.

        Raises:
            ConfigError: there is no such tag.
            ServerError: the server could not be reached, or cannot wake up: memory is missing, or
                it has no weights.
            SlowServerError: it did not wake up in time.
        """
        for tag in tags:
            require_choice("tags", tag, TAGS)
        with self._exclusive(", told to wake up", ServerError) as calls:
            self._wake_up(calls, tags)

    # Parts of these operations

    @property
    def _update_limit_s(self) -> float:
        return self._allowed_s if self.timeout_s is None else self.timeout_s

    def _calls(self, what: str, limit_s: float, error: type[ServerError] = PublishError) -> Calls:
        return Calls(self.url, f"{self.name}{what}", limit_s, error)

    @contextmanager
    def _update(self, path: str, version: int) -> Iterator[Calls]:
        what = f", told to load version {version} from {path}"
        with self._exclusive(what, PublishError) as calls:
            self._seconds = calls.seconds
            yield calls

    @contextmanager
    def _exclusive(self, what: str, error: type[ServerError]) -> Iterator[Calls]:
        """Open the calls of an operation. Operations exclude each other, or one would resume what
        another loads.
        """
        limit_s = self._update_limit_s
        if not self._updating.acquire(timeout=limit_s):
            raise SlowServerError(
                f"{self.name}{what}: the update before it has not ended within {limit_s:g} s"
            )
        try:
            with self._calls(what, limit_s, error) as calls:
                self._require_name(calls)
                yield calls
        finally:
            self._updating.release()

    def _require_base(self, calls: Calls) -> None:
        status = self._status(calls)
        if status.label is None and status.asleep:
            self._wake_up(calls)
            status = self._status(calls)
        if status.label is not None:
            raise calls.refuse(
                f"its base model was replaced by the published weights {status.label}, and "
                "adapters belong on the one before: restart it with the base model"
            )
        if status.paused:
            raise calls.refuse(
                "it is paused, which no update of adapters does: whoever paused it may have left "
                "its weights in pieces; resume it by hand, or restart it"
            )

    def _retire(self, calls: Calls) -> None:
        """Unload published adapters without requests. A failure is logged, and the next update
        tries again.
        """
        try:
            for name in self._adapters.idle(self._loaded_adapters(calls)):
                self._unload_adapter(calls, name)
        except ServerError as error:
            logger.warning("%s", error)

    def _read_published(self, path: str, version: int) -> tuple[str, ExpectedAnswer | None]:
        """The label of a published folder, and what a server must answer with its weights.

        Raises PublishError if this host does not see the folder, or a small file of it is damaged.
        """
        try:
            return weights_label(path, version), self._read_expected(path)
        except OSError as error:
            raise PublishError(
                f"{path} cannot be read here ({error}), and {self.name} is told of folders that "
                "this host sees, too; it was not told"
            ) from error
        except (CheckpointError, ValueError) as error:
            raise PublishError(
                f"{path} cannot be used ({error}); {self.name} was not told of it. Publish again"
            ) from error

    def _read_expected(self, path: str) -> ExpectedAnswer | None:
        """Read the probe of a published folder and note its vocabulary. Warn once if there is no
        probe.
        """
        self._limits = None  # a server that needs an update may have been restarted with others
        vocab_size = folder_vocab_size(published_file(path, "config.json").parent)
        if vocab_size is not None:
            self._vocab_size = vocab_size

        probe = read_weights_probe(path)
        if probe is None:
            self._warn_once("%s: %s has no probe; what the server says is believed", path)
            return None
        return expected_answer(path, probe, self.dtype)

    def _warn_once(self, message: str, *args: object) -> None:
        """Log a warning whose first argument is the name of the server."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, self.name, *args)

    def _check_content(
        self,
        calls: Calls,
        expected: ExpectedAnswer | None,
        adapter: str | None = None,
        must_show_change: bool = False,
    ) -> None:
        """Withdraw the adapter, or the base, and raise WrongContentError if its answer to the probe
        is wrong.
        """
        if expected is None:
            return
        logprobs = self._prompt_logprobs(calls, expected.probe.prompt_ids, adapter)
        answer = CheckedAnswer(expected, logprobs)
        problem = content_problem(answer, self._checked)
        if problem is None and must_show_change:
            problem = self._change_problem(calls, answer)
        if problem is not None:
            raise self._withdrawn(calls, problem, WrongContentError, adapter)
        self._checked = answer

    def _must_show_change(self, calls: Calls, expected: ExpectedAnswer | None) -> bool:
        """Whether the server has yet to show that its weights change, and log-probabilities cannot
        show it.
        """
        if expected is None or expected.shows_steps:
            return False

        # A server that was restarted is perhaps another program.
        if self._changes_weights and self._label(calls) == NO_LABEL:
            self._changes_weights = False
            self._summed = None
        return not self._changes_weights

    def _change_problem(self, calls: Calls, answer: CheckedAnswer) -> str | None:
        """Describe the problem if the weights have the checksums of others, which the server had to
        serve before.
        """
        sums = self._checksums(calls)
        if sums is None:
            return None
        if self._summed is not None and weights_differ(answer, self._summed):
            if sums == self._sums:
                return (
                    "its own checksums of its weights are those of a version before, although the "
                    "weights are others: it has kept the old ones"
                )
            self._changes_weights = True
        self._summed = answer
        self._sums = sums
        return None

    def _checksums(self, calls: Calls) -> str | None:
        """The server's checksums of its weights. None, and one warning, if it tells none."""
        problem = "some are of empty memory, because it has packed weights elsewhere"
        try:
            sums = json.dumps(self._ask_checksums(calls), sort_keys=True)
            if _SHA256_OF_NOTHING not in sums:
                return sums
        except (UnreachableServerError, SlowServerError):
            raise
        except PublishError as error:
            problem = str(error)
        self._warn_once(
            "%s gives no checksums of its weights (%s). While it is busy, nobody would notice "
            "if it kept old weights in 16 bits",
            problem,
        )
        return None

    def _require_effect(
        self,
        calls: Calls,
        path: str,
        expected: ExpectedAnswer | None,
        name: str,
        loaded: Sequence[str],
    ) -> None:
        """Raise WrongContentError if the server ignores adapters. In 16 bits it shows once that it
        does not.

        Adapters of the first steps change less than kernels differ by. So the published ones are
        loaded with a larger factor, under a name of their own, and compared with the base. Requests
        in flight are not touched.
        """
        if expected is None or expected.shows_steps:
            return

        # A server without the adapters of before was restarted.
        if self._uses_adapters and self._adapters.current in loaded:
            return

        # A second, much larger factor is tried before a server is refused.
        self._uses_adapters = False
        problem = None
        other_name = f"{name}-amplified"
        for size in _AMPLIFIED:
            try:
                with amplified(path, size) as folder:
                    if folder is None:  # the adapters change nothing yet
                        return
                    base, changed = self._base_and_amplified(
                        calls, expected.probe.prompt_ids, os.fspath(folder), other_name, loaded
                    )
            except OSError as error:
                logger.warning(
                    "%s: it cannot be shown that adapters have an effect: %s", self.name, error
                )
                return
            problem = effect_problem(base, changed, expected.dtype)
            if problem is None:
                self._uses_adapters = True
                return
        raise calls.refuse(f"{problem}. {_UNLOADED}", WrongContentError)

    def _base_and_amplified(
        self, calls: Calls, ids: Sequence[int], folder: str, name: str, loaded: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """Log-probabilities of the probe by the base, and by the adapters in ``folder``, loaded for
        a moment.
        """
        if name in loaded:  # a client was killed here
            with suppress(PublishError):  # it was unloaded before a smaller factor
                self._unload_adapter(calls, name)
        self._load_adapter(calls, name, folder)
        try:
            with explained_wait():
                base = self._prompt_logprobs(calls, ids)
                changed = self._prompt_logprobs(calls, ids, name)
                return base, changed
        finally:
            with suppress(ServerError):  # a later update unloads it
                self._unload_adapter(calls, name)

    def _withdrawn(
        self,
        calls: Calls,
        problem: str,
        error: type[ServerError] | None = None,
        adapter: str | None = None,
    ) -> ServerError:
        what = ", to be withdrawn after wrong content"
        try:
            with self._calls(what, _WITHDRAW_LIMIT_S) as last_calls:
                if adapter is None:
                    self._withdraw(last_calls)
                else:
                    self._unload_adapter(last_calls, adapter)
        except ServerError as failure:
            logger.warning("%s", failure)
        consequence = _PAUSED if adapter is None else _UNLOADED
        return calls.refuse(f"{problem}. {consequence}", error)

    # Completions

    def note_timeout(self) -> None:
        """See `TimeoutCounter`."""
        self.connections.unanswered += 1

    def require_name(self, timeout_s: float) -> None:
        """Raise ServerError if the server of ``served_name`` does not answer."""
        with self._calls("", timeout_s, ServerError) as calls:
            self._require_name(calls)

    def read_version(self, timeout_s: float) -> int | None:
        """The version in the server's label, or None. Raises ServerError without an answer."""
        with self._calls("", timeout_s, ServerError) as calls:
            return labelled_version(Sleep.read(self._label(calls)).weights)

    def require_token(self, timeout_s: float) -> None:
        """Have the server complete one token, unless it is paused, sleeps or loads weights. Raise
        ServerError if it does not.
        """
        if self._updating.locked():
            return
        with self._calls(", asked for one token", timeout_s, ServerError) as calls:
            before = self._status(calls)
            if before.paused:
                return
            try:
                self._top_logprobs(calls, 1.0)
            except SlowServerError:
                # Another client may have paused it meanwhile, which keeps requests waiting.
                if not self._has_changed(before):
                    raise

    def _has_changed(self, before: ServerStatus) -> bool:
        if self._updating.locked():
            return True
        try:
            with self._calls("", self.status_timeout_s, ServerError) as calls:
                return self._status(calls) != before
        except ServerError:
            return False

    def check_generation(
        self, gconfig: GenerationHyperparameters, routed_experts: bool = False
    ) -> None:
        """Check that the server returns log-probabilities of the distribution that it samples from,
        and with ``routed_experts`` that it was started to return these.

        Call it once, before the first completion. It samples one token. If temperature, top-p or
        top-k of ``gconfig`` change the distribution of the model, it samples a second one.

        Raises:
            ServerError: the server does not. The message says how to start it.
        """
        what = ", asked for log-probabilities"
        with self._calls(what, self._update_limit_s, ServerError) as calls:
            if routed_experts and self._returns_routes(calls) is not True:
                raise calls.refuse(f"it returns no routed experts; {START}")
            plain = self._top_logprobs(calls, 1.0)
            if samples_plainly(gconfig):
                return
            problem = temperature_error(plain, self._top_logprobs(calls, 0.5))
            if problem is not None:
                raise calls.refuse(f"{problem}; {self._how_to_temper}")

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt. It ends at ``stop_token_ids``, not at the model's own
        end-of-sequence token.

        With ``stop_token_ids``, SGLang ends at the latter, too, which is logged once. A completion
        ends with ``length`` at the end of the server's context.

        Call `check_generation` first: the log-probabilities fit the sampled distribution only with
        the right flags.

        Raises:
            PromptError: the prompt is empty or too long, or has token ids outside the vocabulary.
                It was not sent, unless only the server's memory is too small for it. With images
                also: the server expanded them to other tokens, or sampled a token that it had to
                exclude.
            BusyServerError: the server sleeps. The prompt was not sent.
            ServerError: the server could not be reached, failed, aborted the request, or has no
                published weights.
        """
        # Another process may have woken the server since this client last asked.
        if self._sleeps:
            await asyncio.to_thread(self.status)
        if self._sleeps:
            raise BusyServerError(f"{self.name} sleeps, and takes requests after it was woken up")

        # The adapter stays loaded until the answer is there.
        request = await self._fitting(request)
        with self._adapters.request() as adapter:
            path, body = self._completion(request, adapter)
            answer = await self._ask_completion(request, path, body)
        with readable(f"{self.name}: a completion", ServerError):
            response = self._read_completion(request, answer, adapter)
            if request.images is not None:
                response = replace(response, input_tokens=list(answer["prompt_token_ids"]))
        response = check_images(request, response, self.name)
        return await with_routes(request, response, self.name, self._read_routes, answer)

    async def _ask_completion(self, request: ModelRequest, path: str, body: Json) -> Json:
        try:
            return await self.connections.ask(path, body, self.generation_timeout_s)
        except ServerError as error:
            if self._no_memory_for is None or self._no_memory_for not in str(error):
                raise
            raise PromptError(
                f"{shown_prompt(request)} is longer than the memory of {self.name} allows, which "
                f"is less than its context: {error}. Shorten or leave out the sample, or give the "
                "server more memory for its KV cache"
            ) from error

    async def _fitting(self, request: ModelRequest) -> ModelRequest:
        try:
            limits = self._limits or await self._ask_limits()
            return limits.fit(request, self.name)
        except PromptError:  # the limits may stem from a server that ran here before
            return (await self._ask_limits()).fit(request, self.name)

    async def _ask_limits(self) -> PromptLimits:
        try:
            models = await self.connections.ask("/v1/models", None, self.status_timeout_s)
        except (PublishError, BusyServerError):
            raise  # unreachable or too slow, so the limits are still unknown
        except ServerError as error:
            logger.warning("%s does not say how long a prompt may be: %s", self.name, error)
            models = {}
        return self._note_limits(models)

    # Scores of given tokens

    def served_model(self) -> str:
        """Name of the model that the server was started with, or raise ServerError."""
        with self._calls(", asked for its model", self.status_timeout_s, ServerError) as calls:
            names, _ = self._model_names(calls)
            if not names:
                raise calls.refuse("it lists no model at /v1/models; expected the one it serves")
            return names[0]

    def prompt_logprobs(self, input_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it, at temperature 1.

        Raises:
            PromptError: as for `agenerate`. The text must leave room for one more token.
            ServerError: the server could not be reached, or failed.
        """
        with self._calls(", asked for scores", self.generation_timeout_s, ServerError) as calls:
            request = ModelRequest(input_ids)
            try:
                limits = self._limits or self._read_limits(calls)
                limits.fit(request, self.name)
            except PromptError:  # as in `_fitting`
                self._read_limits(calls).fit(request, self.name)
            return self._prompt_logprobs(calls, input_ids)

    def _read_limits(self, calls: Calls) -> PromptLimits:
        return self._note_limits(self._models(calls))

    def _note_limits(self, models: Json) -> PromptLimits:
        limits = stated_limits(models, self._vocab_size, self._kept_free)
        self._limits = limits
        return limits

    def _loaded_adapters(self, calls: Calls) -> list[str]:
        _, adapters = self._model_names(calls)
        return adapters

    def _require_name(self, calls: Calls) -> None:
        if self.served_name is None:
            return
        names = self._own_names(calls)
        if self.served_name not in names:
            raise calls.refuse(
                f"another server answers at this URL: it serves {names}, expected the model "
                f"{self.served_name}. It was told nothing"
            )

    def _own_names(self, calls: Calls) -> list[str]:
        """Names that the server was started with."""
        names, _ = self._model_names(calls)
        return names

    def _model_names(self, calls: Calls) -> tuple[list[str], list[str]]:
        """Names of the served models, and of the adapters."""
        models = self._models(calls)
        with calls.reading("its list of models"):
            adapters = [card["id"] for card in models["data"] if card.get("parent") is not None]
            names = [card["id"] for card in models["data"] if card.get("parent") is None]
        return names, adapters

    def _models(self, calls: Calls) -> Json:
        return calls.get("look", "/v1/models", key=self.api_key, advice=self._key_advice)
