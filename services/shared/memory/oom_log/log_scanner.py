"""Scan a log of any size for the messages of an out-of-memory failure.

The log is streamed: at most one block and its surroundings are in memory. Messages broken over
lines, prefixed by ranks and timestamps or interleaved by other ranks are joined again.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO

from services.shared.memory.oom_log.formats.table import OTHER_FORMATS
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.oom_log.message_parser import Message, read_message
from services.shared.memory.oom_log.stated_settings import (
    NOTHING_STATED,
    StatedSettings,
    settings_in,
)
from services.shared.memory.oom_log.traceback_sites import (
    NOTE_WORDS,
    Note,
    Site,
    cloned_tensor_in,
    completed_steps_in,
    engine_in,
    notes_in,
    power2_divisions_in,
    sites_in,
)

_BLOCK = 1 << 20
_BEFORE = 24 << 10  # a traceback of 200 frames
_AFTER = 4 << 10  # the longest message, its lines prefixed
_MOST_READINGS = 300  # per trigger word; beyond it a log only repeats itself; bounds the time
_MOST_MESSAGES = 64
_MOST_TRACEBACKS = 8
_SETTINGS_WITHIN = 1 << 19  # a log begins with the command and the configuration
_SAME_MESSAGE = 160  # two trigger words nearer than this belong to one message

# Every text of the catalogue contains at least one of these, unbroken by a line end.
_ALLOCATOR_TRIGGERS = (
    "of memory",
    "ut of\n",
    "ut of\r",
    "-of-memory",
    "OOM",
    "OutOfMemory",
    "ried to allocate",
)
_TRIGGERS = tuple(
    dict.fromkeys((*_ALLOCATOR_TRIGGERS, *(t for f in OTHER_FORMATS for t in f.triggers)))
)
_WITH_ACCOUNTS = (MessageKind.ALLOCATOR, MessageKind.PROSE)
_SECONDARY_KINDS = (
    MessageKind.KILLED,
    MessageKind.CORRUPT_SIZE,
    MessageKind.COLLECTIVE,
    MessageKind.ON_CHIP,  # the search for kernels prints it for every candidate that is too large
)


@dataclass(frozen=True)
class LogReading:
    """What was read from a log about one failure."""

    messages: tuple[Message, ...] = ()  # distinct, in order of appearance
    repetitions: int = 0  # how many failure messages the log holds in all
    ranks: frozenset[int] = frozenset()  # ranks that printed one
    sites: tuple[Site, ...] = ()  # of the first message's traceback, the innermost last
    notes: frozenset[Note] = frozenset()
    completed_steps: int | None = None
    cloned_tensor: str | None = None
    power2_divisions: int | None = None
    engine: str | None = None  # the framework whose code the traceback runs through
    settings: StatedSettings = NOTHING_STATED  # what the log states of the job
    lines: int = 0  # of the whole log

    @property
    def primary(self) -> Message | None:
        """Return the first message that is not a consequence of another failure."""
        stated = [m for m in self.messages if m.kind not in _SECONDARY_KINDS]
        return next(iter(stated or self.messages), None)


def read_log(source: str | bytes | IO[str] | IO[bytes]) -> LogReading:
    """Stream `source` and return what it says of an out-of-memory failure; never raises on content.

    Memory is bounded by one block of 1 MiB and reading by 300 places for each trigger word; the
    rest of the log is only searched for such words.
    """
    reader = _Reader()
    kept, searched, line_ends, last = "", 0, 0, "\n"
    for block in _blocks(source):
        line_ends, last = line_ends + block.count("\n"), block[-1:] or last
        kept += block
        limit = max(searched, len(kept) - _AFTER)
        reader.search(kept, searched, limit)
        start = max(0, limit - _BEFORE)
        kept, searched = kept[start:], limit - start
    reader.search(kept, searched, len(kept))
    return replace(reader.finish(kept), lines=line_ends + (last != "\n"))


def _blocks(source: str | bytes | IO[str] | IO[bytes]) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    offset = 0
    while True:
        if isinstance(source, (str, bytes)):
            block: str | bytes = source[offset : offset + _BLOCK]
            offset += _BLOCK
        else:
            block = source.read(_BLOCK)
        if not block:
            return
        text = decode(block) if isinstance(block, bytes) else block
        # UTF-16 written by a Windows shell reads as ASCII once its zero bytes are gone.
        yield text.replace("\0", "")


@dataclass
class _Reader:
    messages: dict[tuple[object, ...], Message] = field(default_factory=dict)
    readings: Counter[str] = field(default_factory=Counter)
    repetitions: int = 0
    ranks: set[int] = field(default_factory=set)
    traces: list[tuple[Message, tuple[Site, ...]]] = field(default_factory=list)
    notes: set[Note] = field(default_factory=set)
    completed_steps: int | None = None
    cloned_tensor: str | None = None
    power2_divisions: int | None = None
    engine: str | None = None
    settings: StatedSettings = NOTHING_STATED
    searched_for_settings: int = 0

    def search(self, text: str, start: int, end: int) -> None:
        """Look for messages whose trigger word begins in `text[start:end]`."""
        if self.searched_for_settings < _SETTINGS_WITHIN:
            self.searched_for_settings += end - start
            upto = min(end, start + _SETTINGS_WITHIN)
            self.settings = self.settings.filled_from(settings_in(text[start:upto]))
        if any(text.find(word, start, end + _AFTER) >= 0 for word in NOTE_WORDS):
            new = text[start : end + _AFTER]
            self.notes |= notes_in(new)
            self.cloned_tensor = self.cloned_tensor or cloned_tensor_in(new)
            self.power2_divisions = self.power2_divisions or power2_divisions_in(new)
        taken = -_SAME_MESSAGE
        for hit, word in self._hits(text, start, end):
            if hit - taken < _SAME_MESSAGE:
                continue
            self.readings[word] += 1
            message = _message_at(text, hit)
            if message is not None:
                taken = hit
                self._take(message, text[max(0, hit - _BEFORE) : hit])

    def _hits(self, text: str, start: int, end: int) -> list[tuple[int, str]]:
        hits: list[tuple[int, str]] = []
        for word in _TRIGGERS:
            room = _MOST_READINGS - self.readings[word]
            at = start - len(word)
            while room > 0:
                at = text.find(word, at + len(word), end + len(word) - 1)
                if at < 0:
                    break
                hits.append((at, word))
                room -= 1
        return sorted(hits)

    def _take(self, message: Message, before: str) -> None:
        self.repetitions += 1
        if message.rank is not None:
            self.ranks.add(message.rank)
        if len(self.traces) < _MOST_TRACEBACKS:
            self.traces.append((message, sites_in(before)))
            self.engine = self.engine or engine_in(before)
            if self.completed_steps is None:
                self.completed_steps = completed_steps_in(before)
        if len(self.messages) < _MOST_MESSAGES:
            self.messages.setdefault(message.identity, message)

    def finish(self, tail: str) -> LogReading:
        reading = LogReading(
            messages=tuple(self.messages.values()),
            repetitions=self.repetitions,
            ranks=frozenset(self.ranks),
            notes=frozenset(self.notes),
            completed_steps=self.completed_steps,
            cloned_tensor=self.cloned_tensor,
            power2_divisions=self.power2_divisions,
            settings=self.settings,
        )
        primary = reading.primary
        sites = next((s for m, s in self.traces if m is primary and s), sites_in(tail))
        return replace(reading, sites=sites, engine=self.engine or engine_in(tail))


# A shell prints the word on a line of its own, which is lost when lines are joined.
_KILLED_LINE = "process: Killed"
_ANSI = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
# Line prefixes of launchers, schedulers and containers. A named group is the rank.
_PREFIX = re.compile(
    r"\s{0,20}(?:"
    r"\[(?:rank|Rank ?|default|RANK ?)?(?P<bracket>[0-9]{1,5})\](?:<\w{1,10}>)?:?(?=\s|$)"
    r"|\[[0-9]{1,5},(?P<mpi>[0-9]{1,5})\]<\w{1,10}>:?"
    r"|(?:rank|Rank|RANK)[ _-]?(?P<word>[0-9]{1,5})\s?[:|\]]"
    r"|(?P<slurm>[0-9]{1,5}):(?=\s)"
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?\]?"
    r"|\[?[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?\]?(?=\s)"
    r"|\(\w{1,40} pid=[0-9]{1,9}[^)\n]{0,60}\)"
    r"|\[?(?:ERROR|INFO|WARNING|stderr|stdout|E|W)\]?(?=[\s:])[:\s]?"
    r"|[\w.-]{1,60}\s?\|(?=\s)"
    r"|>(?=\s)"
    r")"
)


def _message_at(text: str, hit: int) -> Message | None:
    begin = text.rfind("\n", max(0, hit - 1000), hit) + 1 or max(0, hit - 100)
    if hit - begin < 60:  # the line may be the second half of a broken one
        begin = _line_before(text, begin)
    message = _message_between(text, begin, hit)
    if message is None:  # or the trigger word is at the end of a longer message
        begin = _line_before(text, _line_before(text, begin))
        message = _message_between(text, begin, hit)
    return message


def _line_before(text: str, begin: int) -> int:
    earliest = max(0, begin - 400)
    found = text.rfind("\n", earliest, max(0, begin - 1))
    return earliest if found < 0 else found + 1


def _message_between(text: str, begin: int, hit: int) -> Message | None:
    lines = _ANSI.sub("", text[begin : hit + _AFTER]).replace("\\n", "\n").splitlines()
    hit_line = text.count("\n", begin, hit)
    rank = _split_prefix(lines[hit_line])[0] if hit_line < len(lines) else None
    own = [
        _KILLED_LINE if body == "Killed" else body
        for r, body in map(_split_prefix, lines)
        if r is None or r == rank
    ]
    message = read_message(" ".join(own))
    if message is None or (message.kind in _WITH_ACCOUNTS and message.allocated is None):
        # A terminal of fixed width breaks lines inside words and numbers.
        unbroken = read_message("".join(own))
        message = unbroken if unbroken and unbroken.allocated else message
    return replace(message, rank=rank) if message else None


def _split_prefix(line: str) -> tuple[int | None, str]:
    rank, at = None, 0
    for _ in range(6):
        found = _PREFIX.match(line, at)
        if found is None or found.end() == at:
            break
        at = found.end()
        number = next((g for g in found.groupdict().values() if g), None)
        rank = int(number) if number and rank is None else rank
    return rank, line[at:].strip()
