"""Recorded answers and results of calls, which are given out again when a ticket is run again.

A record is found by its content (`Place`): the ticket, a digest of the request or call, and how
often the episode has asked the same before. The order of calls plays no part, because
``asyncio.gather`` interleaves a second run in another way. The request of a later turn contains all
answers before it, so its digest is also its path.

An answer is given out only if its weights exist in this run. Those up to the first version after a
restore do, because the generation has them. A later version exists once a server reports the label
that the record carries: then the lost weights were made again, bit for bit.

Records are kept as encoded bytes until their ticket ends, so that a capture only joins them.
"""

import math
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.plain_values import from_plain_json, plain_json
from ...utils.record_log import RecordLog, join_payload, split_payload
from ..servers.api import STOP_REASONS, ModelRequest, ModelResponse, labelled_version

logger = get_logger(__name__)

_SIZE = struct.Struct("<I")  # of a record in a state, in bytes
_TOKENS = np.dtype("<u4")
_NARROW = np.dtype("<f4")
_WIDE = np.dtype("<f8")
_ROUTE_BYTES = {"uint8": 1, "int16": 2}


class Kind(StrEnum):
    """Kind of a record."""

    ANSWER = "answer"
    CALL = "call"
    """The result of a call."""
    BEGUN = "begun"
    """The intent of a call with an outside effect, written before it."""


class Place(NamedTuple):
    """The key of a record.

    Attributes:
        ticket: number of the ticket.
        key: digest of the request or call.
        nth: how often the episode has asked the same before.
        kind: kind of the record.
    """

    ticket: int
    key: str
    nth: int
    kind: Kind


class Bounds(NamedTuple):
    """Oldest and newest version of the weights that may sample a ticket."""

    oldest: int
    newest: int

    def outside(self, versions: Iterable[int]) -> int | None:
        """The first of ``versions`` that is not allowed, or None."""
        for version in versions:
            if not self.oldest <= version <= self.newest:
                return version
        return None


@dataclass(frozen=True)
class Record:
    """A record with its encoded bytes: size of the head, head as JSON, body.

    The head of an answer has the number of ``tokens``, their ``versions`` as runs ``[version,
    count]``, the ``labels`` of these versions as far as they were known, the reason of the
    ``stop``, and whether the log-probabilities are ``wide``. Its body has the token ids in 32 bits
    and the log-probabilities in 32, or in 64 if 32 would change one. With routed experts the head
    has their shape and dtype as ``routes``, and the body ends with them. The body of a call is
    JSON.
    """

    place: Place
    head: Mapping[str, Any]
    data: bytes

    @classmethod
    def of_answer(
        cls,
        place: Place,
        response: ModelResponse,
        labels: Mapping[int, str],
    ) -> "Record":
        """Encode an answer. ``labels`` has the known labels by version."""
        logprobs = np.array(response.output_logprobs, _WIDE)
        narrow = logprobs.astype(_NARROW)
        wide = not np.array_equal(logprobs, narrow)
        tokens = np.array(response.output_tokens, _TOKENS)

        runs = [[version, len(list(run))] for version, run in groupby(response.output_versions)]
        sampled_by = {version for version, _ in runs}
        known = sorted(sampled_by & labels.keys())
        head = {
            "tokens": len(tokens),
            "versions": runs,
            "labels": {str(version): labels[version] for version in known},
            "stop": response.stop_reason,
            "wide": wide,
        }
        body = tokens.tobytes() + (logprobs if wide else narrow).tobytes()
        routes = response.routed_experts
        if routes is not None:
            head["routes"] = [*routes.shape, routes.dtype.name]
            body += routes.tobytes()
        return cls._encode(place, head, body)

    @classmethod
    def of_call(cls, place: Place, result: Any) -> "Record":
        """Encode the result of a call. Raises ConfigError if it would come back as another type,
        and ValueError or RecursionError if it is too large or too deep for JSON.
        """
        return cls._encode(place, {}, plain_json(result, "it", exact=True))

    @classmethod
    def of_intent(cls, place: Place) -> "Record":
        """Encode the intent of a call."""
        return cls._encode(place, {}, b"")

    @classmethod
    def _encode(
        cls,
        place: Place,
        head: dict[str, Any],
        body: bytes,
    ) -> "Record":
        # The names are on disk.
        named = {
            "ticket": place.ticket,
            "key": place.key,
            "nth": place.nth,
            "kind": place.kind,
        }
        head = {**named, **head}
        return cls(place, head, join_payload(head, body))

    @classmethod
    def decode(cls, data: bytes) -> "Record":
        """Read an encoded record. Raises ValueError if it is not as this class writes it."""
        head, body = split_payload(data)
        place = Place(
            _count(head, "ticket"),
            _text(head, "key"),
            _count(head, "nth"),
            Kind(_text(head, "kind")),
        )
        if place.kind is Kind.ANSWER:
            _check_answer(head, len(body))
        if place.kind is Kind.CALL:
            _check_plain(body)
        return cls(place, head, data)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The versions of the weights that sampled the answer, in order. Empty for calls."""
        return tuple(version for version, _ in self.head.get("versions", ()))

    def label(self, version: int) -> str | None:
        """The label of a version at the time of the answer. None: not known then."""
        return self.head["labels"].get(str(version))

    def with_label(self, version: int, label: str) -> "Record":
        """The record of an answer with one more label."""
        labels = {**self.head["labels"], str(version): label}
        head = {**self.head, "labels": labels}
        return Record(self.place, head, join_payload(head, self._body()))

    def result(self) -> Any:
        """The plain value that a call returned."""
        return from_plain_json(self._body())

    def response(self, request: ModelRequest) -> ModelResponse:
        """The answer to ``request``."""
        body = self._body()
        n_tokens = self.head["tokens"]
        kind = _WIDE if self.head["wide"] else _NARROW
        versions = []
        for version, count in self.head["versions"]:
            versions += [version] * count
        routes = None
        if "routes" in self.head:
            *shape, dtype = self.head["routes"]
            begin = n_tokens * (_TOKENS.itemsize + kind.itemsize)
            routes = np.frombuffer(body, dtype, offset=begin).reshape(shape)
        return ModelResponse(
            list(request.input_ids),
            np.frombuffer(body, _TOKENS, n_tokens).tolist(),
            np.frombuffer(body, kind, n_tokens, n_tokens * _TOKENS.itemsize).tolist(),
            versions,
            self.head["stop"],
            routes,
        )

    def _body(self) -> bytes:
        return split_payload(self.data)[1]


def _check_plain(body: bytes) -> None:
    try:
        from_plain_json(body)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its result is no plain value: {error!r:.80}") from error


def _check_answer(head: Mapping[str, Any], n_bytes: int) -> None:
    n_tokens = _count(head, "tokens")
    labels = head.get("labels")
    if not isinstance(labels, dict) or not set(map(type, labels.values())) <= {str}:
        raise ValueError(f"its labels are {labels!r:.80}")
    if head.get("stop") not in STOP_REASONS or not isinstance(head.get("wide"), bool):
        raise ValueError("it does not say why the answer ended, or how wide its numbers are")

    # Runs of versions cover all tokens, and the body has a number of each kind for each.
    runs = head.get("versions")
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        raise ValueError(f"its versions are {runs!r:.80}")
    kind = _WIDE if head["wide"] else _NARROW
    expected = n_tokens * (_TOKENS.itemsize + kind.itemsize) + _route_bytes(head)
    if sum(count for _, count in runs) != n_tokens or n_bytes != expected:
        raise ValueError(f"it has {n_bytes} bytes and versions {runs!r:.80} for {n_tokens} tokens")


def _route_bytes(head: Mapping[str, Any]) -> int:
    if "routes" not in head:
        return 0
    routes = head["routes"]
    if not isinstance(routes, list) or len(routes) != 4:
        raise ValueError(f"its routed experts are {routes!r:.80}")
    *shape, dtype = routes
    are_sizes = all(type(size) is int and size > 0 for size in shape)
    if not are_sizes or dtype not in _ROUTE_BYTES:
        raise ValueError(f"its routed experts are {routes!r:.80}")
    return math.prod(shape) * _ROUTE_BYTES[dtype]


def _is_run(run: Any) -> bool:
    if not isinstance(run, list) or len(run) != 2:
        return False
    version, count = run
    return type(version) is int and type(count) is int and count > 0


def _count(head: Mapping[str, Any], name: str) -> int:
    value = head.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"its {name} is {value!r:.80}")
    return value


def _text(head: Mapping[str, Any], name: str) -> str:
    value = head.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {value!r:.80}")
    return value


class Recorded:
    """The records of all tickets that have not ended. Any thread may call it.

    The calls of finished tickets with an outside effect stay until their step is trained. A later
    start with a smaller staleness bound samples these tickets again, without their effects.

    Attributes:
        replayed, replayed_tokens: answers that were given out, and their tokens.
        dropped: answers that were too stale, or whose weights do not exist in this run.
        unused: records of ended tickets that no episode asked for.
    """

    def __init__(self, replay: str) -> None:
        self.replayed = 0
        self.replayed_tokens = 0
        self.dropped = 0
        self.unused = 0
        self._replay = replay

        # The lock guards all that follows.
        self._lock = threading.Lock()
        self._log: RecordLog | None = None
        self._records: dict[int, dict[Place, Record]] = {}  # by ticket
        # records of earlier lives that no episode has asked for yet
        self._unasked: set[Place] = set()
        # tickets with a dropped answer, whose other records may rightly stay unused
        self._changed: set[int] = set()
        self._said = set[str]()  # warnings that come once

        # Versions that exist without a label, last one that exists, and labels of this life.
        self._restored = False
        self._trusted: int | None = None
        self._confirmed = -1
        self._labels: dict[int, str] = {}
        # answers by weights that are published and not confirmed yet
        self._early: list[Record] = []

    # Records of earlier lives

    def load(self, records: Iterable[bytes]) -> None:
        """Take the records of a restored generation."""
        with self._lock:
            self._restored = True
            self._add(records)

    def follow(self, log: RecordLog, records: Iterable[bytes]) -> None:
        """Take the records that followed the generation, and write new ones to ``log``. Of two
        records with one place, the later one counts.
        """
        with self._lock:
            self._log = log
            self._add(records)

    def keep(self, outstanding: Set[int], finished: Set[int], next_number: int) -> None:
        """Keep the records of the ``outstanding`` tickets, and of those from ``next_number`` on,
        which will be handed out again. Of ``finished`` ones keep what `forget` keeps.
        """
        with self._lock:
            for ticket in list(self._records):
                if ticket < next_number and ticket not in outstanding:
                    self._remove(ticket, ticket in finished)

    def sample_again(self, tickets: Iterable[int]) -> None:
        """Note that finished tickets get other answers, so that they may make other calls."""
        with self._lock:
            self._changed.update(tickets)

    def state(self) -> bytearray:
        """All records that are kept, for `load` after `split_records`."""
        with self._lock:
            parts = []
            for records in self._records.values():
                for record in records.values():
                    parts += (_SIZE.pack(len(record.data)), record.data)
        return bytearray().join(parts)

    # Weights

    def confirm(self, version: int, label: str | None) -> None:
        """Note that weights of ``version`` exist now, under ``label`` if a server says so. Drops
        the answers of weights that this run has not made again.
        """
        if labelled_version(label) != version:
            label = None
        with self._lock:
            if self._trusted is None:
                self._trusted = version if self._restored else -1
            self._confirmed = version
            if label is not None:
                self._labels[version] = label
            self._label_early(version, label)
            if version <= self._trusted or self._replay == "all":
                return

            # If no earlier life made these weights, the later weights of those lives are lost, too.
            answers = list(self._unasked_answers())
            known = {record.label(version) for record in answers if version in record.versions}
            known.discard(None)  # nobody said
            diverged = label is not None and bool(known) and label not in known
            for record in answers:
                lost = version in record.versions and not self._exists(record, version)
                if lost or (diverged and max(record.versions, default=-1) >= version):
                    self._drop(record)

    def newest(self, ticket: int, bounds: Bounds) -> int:
        """The newest version that the records of a ticket need, or -1. The ticket should start when
        it exists.
        """
        with self._lock:
            needed = [-1]
            for place, record in self._records.get(ticket, {}).items():
                if place in self._unasked and bounds.outside(record.versions) is None:
                    needed += record.versions
            return max(needed)

    def drop_newer(self, ticket: int) -> None:
        """Drop the answers of a ticket whose weights do not exist yet."""
        with self._lock:
            for place, record in list(self._records.get(ticket, {}).items()):
                newest = max(record.versions, default=-1)
                if place in self._unasked and newest > self._confirmed:
                    self._drop(record)

    # Episodes

    def begin(self, place: Place) -> None:
        """Record that a call with an outside effect begins, and wait until this is on disk, with
        all records before it.

        Raises ConfigError if there is no log, and CheckpointWriteError if it cannot be written.
        Then the call must not be made.
        """
        log = self._log
        if log is None:
            raise ConfigError(
                "a call with once=True needs the episode log, so that it is not made again after a "
                "kill: register the RolloutExecutor before RecoverHandler.load, and set "
                "recover.episode_log_s"
            )
        record = Record.of_intent(place)
        with self._lock:
            self._records.setdefault(place.ticket, {})[place] = record
            written = log.append(record.data)
        log.sync(written)

    def take(self, place: Place, bounds: Bounds) -> Record | None:
        """The record of an earlier life for this place, once. None: there is none that may be used,
        so ask a server.
        """
        with self._lock:
            if place not in self._unasked:
                return None
            record = self._records[place.ticket][place]
            exists = all(self._exists(record, version) for version in record.versions)
            if not exists or bounds.outside(record.versions) is not None:
                self._drop(record)
                return None
            self._unasked.remove(place)
            if place.kind is Kind.ANSWER:
                self.replayed += 1
                self.replayed_tokens += record.head["tokens"]
            return record

    def note_answer(
        self, place: Place, request: ModelRequest, response: ModelResponse
    ) -> ModelResponse:
        """Record an answer, with the labels of its versions. Returns it as a later life reads it,
        also if its numbers had other types.
        """
        with self._lock:
            record = Record.of_answer(place, response, self._labels)
            self._note(record)
            if max(record.versions, default=-1) > self._confirmed:
                self._early.append(record)
        return record.response(request)

    def note(self, record: Record) -> None:
        """Record a call."""
        with self._lock:
            self._note(record)

    def warn_unrecorded(self, what: str, error: Exception) -> None:
        """Say once that a call cannot be recorded."""
        if self._is_first("unrecorded"):
            logger.warning(
                "the %s cannot be recorded, so that the call is made again after a kill, or ends "
                "in CallLost if it had once=True: %s. This is said once",
                what,
                error,
            )

    def warn_mixed(self, fn: str) -> None:
        """Say once that methods of two objects cannot be told apart."""
        if self._is_first("mixed"):
            logger.warning(
                "%s was called for two objects with equal arguments in one episode. Their results "
                "may be exchanged after a kill, because a call is known by the name of its "
                "function and its arguments. Pass what differs as an argument, or give call "
                "functools.partial(object.method), which the object is a part of. This is said "
                "once",
                fn,
            )

    def forget(self, ticket: int, finished: bool) -> None:
        """Drop the records of a ticket that has ended, but not the calls of a ``finished`` one
        with an outside effect.
        """
        with self._lock:
            unused = self._remove(ticket, finished)
            self.unused += unused
            if not unused or ticket in self._changed:
                return
        if not self._is_first("unused"):
            return
        logger.warning(
            "ticket %d did not ask for %d of its recorded answers and results, so it was sampled "
            "again in part. Its workflow draws random numbers outside of engine.random, reads the "
            "clock, takes the first answers of many, or was changed. This is said once",
            ticket,
            unused,
        )

    def stats(self) -> dict[str, float]:
        """The counts, and the state of the log."""
        with self._lock:
            numbers: dict[str, float] = {
                "replayed": self.replayed,
                "replayed_tokens": self.replayed_tokens,
                "dropped": self.dropped,
                "unused": self.unused,
            }
            log = self._log
        if log is not None:
            numbers |= {
                "log_bytes": log.n_bytes,
                "log_lag_s": log.lag_s,
                "log_failed": log.failed,
            }
        return numbers

    # With the lock

    def _add(self, records: Iterable[bytes]) -> None:
        unreadable = 0
        for data in records:
            try:
                record = Record.decode(data)
            except ValueError as error:
                if not unreadable:
                    logger.warning("a record cannot be read, its request is asked again: %s", error)
                unreadable += 1
                continue
            self._records.setdefault(record.place.ticket, {})[record.place] = record
            self._unasked.add(record.place)
        if self._replay == "off":
            self._keep_effects()

    def _keep_effects(self) -> None:
        """Drop all records but those of calls with an outside effect, which nothing may repeat."""
        for records in self._records.values():
            for place in list(records):
                if place._replace(kind=Kind.BEGUN) not in records:
                    del records[place]
                    self._unasked.discard(place)

    def _label_early(self, version: int, label: str | None) -> None:
        """Record answers again, with the label of a version that sampled them before it was
        confirmed.
        """
        early = self._early
        self._early = []
        for record in early:
            if label is not None and version in record.versions:
                record = record.with_label(version, label)
                kept = self._records.get(record.place.ticket, {})
                if record.place in kept:
                    kept[record.place] = record
                if self._log is not None:
                    self._log.append(record.data)
            if max(record.versions) > version:
                self._early.append(record)

    def _exists(self, record: Record, version: int) -> bool:
        assert self._trusted is not None, "no ticket starts before a version is set"
        if version <= self._trusted:
            return True
        if self._replay == "all":
            return version <= self._confirmed
        label = self._labels.get(version)
        return label is not None and label == record.label(version)

    def _unasked_answers(self) -> Iterator[Record]:
        for place in self._unasked:
            if place.kind is Kind.ANSWER:
                yield self._records[place.ticket][place]

    def _drop(self, record: Record) -> None:
        place = record.place
        self.dropped += 1
        self._changed.add(place.ticket)
        self._unasked.remove(place)
        del self._records[place.ticket][place]

    def _note(self, record: Record) -> None:
        self._records.setdefault(record.place.ticket, {})[record.place] = record
        if self._log is not None:
            self._log.append(record.data)

    def _is_first(self, warning: str) -> bool:
        with self._lock:
            is_first = warning not in self._said
            self._said.add(warning)
            return is_first

    def _remove(self, ticket: int, finished: bool) -> int:
        """Number of records that no episode asked for. The intent of a recorded call does not
        count.
        """
        records = self._records.pop(ticket, {})
        if finished:
            self._keep_calls(ticket, records)
        unasked = records.keys() & self._unasked
        self._unasked -= unasked
        return sum(place.kind is not Kind.BEGUN for place in unasked)

    def _keep_calls(self, ticket: int, records: Mapping[Place, Record]) -> None:
        """Keep all calls if one had an outside effect: its arguments may be results of others."""
        calls = {}
        had_effect = False
        for place, record in records.items():
            if place.kind is Kind.ANSWER:
                continue
            calls[place] = record
            if place.kind is Kind.BEGUN:
                had_effect = True
        if had_effect:
            self._records[ticket] = calls


def split_records(state: bytes) -> list[bytes]:
    """The records in a `Recorded.state`. Raises CheckpointMismatchError if it is cut off."""
    records = []
    at = 0
    while at < len(state):
        begin = at + _SIZE.size
        if begin > len(state):
            break
        at = begin + _SIZE.unpack_from(state, begin - _SIZE.size)[0]
        records.append(state[begin:at])
    if at != len(state):
        raise CheckpointMismatchError(
            f"the recorded answers in the state of the rollouts end after {len(state)} bytes, in "
            "the middle of a record"
        )
    return records
