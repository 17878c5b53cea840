"""`packer.writer`: a set made sample by sample, from a program.

    with packer.writer("out-hdf5", to="hdf5", classes=("cat", "dog")) as out:
        for key, picture, label in samples:
            out.write(key, image=picture, label=label)

Shards are written as samples come, into the working folder of `packer.conversion.journal`. The end of the block commits
the set: index, shards, dataset.json last. After an error in the block, or a kill, there is no set, and the directory is
as it was before; the next writer starts over. A process that is forked in the block can neither write nor close nor
remove the set.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from cache.errors import BadNameError, BadSampleError, OutputError, SourceError, UnknownNameError
from cache.messages import Silent, Watcher
from packer.columns import PartMeta
from packer.conversion.commit import replaced_set
from packer.conversion.journal import Journal
from packer.conversion.ops import check_ops
from packer.conversion.options import ConvertOptions, Images, Shards, refuse_others, takes_old_names
from packer.conversion.pack import ShardPacker, disk_full
from packer.conversion.plan import Plan, PlannedShard, default_shard_bytes
from packer.conversion.saved import Job
from packer.formats import format_named
from packer.formats.base import ShardSpec
from packer.output import local_output
from packer.sources.base import ListingBuilder, SourceListing, check_names
from packer.sources.samples import EXAMINED, SampleForm, features_of
from readers.layout import DatasetInfo, SplitName
from readers.table import Buffer

__all__ = ["SetWriter", "convert_stream", "writer"]

_FINGERPRINT = "written by a program "
_LOST = "start over"


@dataclass(slots=True)
class _Split:
    """The shards of a split: complete ones, under a name without their number, and the open one."""

    whole: list[PartMeta] = field(default_factory=list)
    open: ShardPacker | None = None
    bytes: int = 0  # of the payloads in the open shard


class SetWriter:
    """Writes samples into a new set; see `writer`. One thread at a time.

    info: the description of the set, after the block has ended without an error.
    listing, metas: then also the samples' splits, fields and classes, and the facts of the shards.
    left_out: (name, reason) of samples that are not in the set, for its report.
    """

    def __init__(
        self,
        output: Path,
        options: ConvertOptions,
        fields: Mapping[str, str] | None,
        classes: Sequence[str],
        *,
        overwrite: bool = False,
        source: str = "a program",
        watcher: Watcher | None = None,
    ) -> None:
        self.info: DatasetInfo | None = None
        self.listing, self.metas = SourceListing({}, {}, ()), list[PartMeta]()
        self.left_out: list[tuple[str, str]] = []
        self._options, self._classes, self._source, self._watcher = options, tuple(classes), source, watcher or Silent()
        self._format, self._fingerprint = format_named(options.to), _FINGERPRINT + uuid.uuid4().hex
        self._form: SampleForm | None = None
        self._wanted = fields
        self._splits: dict[str, _Split] = {}
        self._keys: set[int] = set()
        self._count = 0
        self._ended, self._process = False, os.getpid()
        with ExitStack() as opened:
            self._journal = opened.enter_context(Journal(output))
            if self._journal.finished_plan() is not None and not overwrite:
                raise OutputError(f"{output}: has a set; pass overwrite=True to replace it, or choose another output")
            begun = self._journal.unfinished or ""  # if by a writer, it cannot be continued
            self._journal.begin(Plan((), {}, self._fingerprint), overwrite or begun.startswith(_FINGERPRINT))
            opened.pop_all()

    def write(self, key: str, *, label: Any = None, split: str | None = None, **fields: Any) -> None:
        """Add a sample.

        key: its name, unique in the split.
        label: a class number, or a name among `classes`; None for none. Or in every sample a floating-point number, a
            vector of a fixed length, or a list of names among `classes`, which become the field `target`.
        split: default that of the writer.
        fields: values of any of the fields, as bytes or values that `readers.fields` encodes; None for a missing field.

        Raises BadSampleError, after which the writer continues without this sample; OutputError, which ends it.
        """
        self._check_process()
        if self._ended:
            raise OutputError(f"{self._journal.out}: this writer has ended; make another one")
        name = split or self._options.split or "train"
        if not isinstance(key, str):
            raise BadSampleError(f"a key is a text, not {key!r:.80}")
        try:
            with self._errors(key):
                check_names([key], f"split {SplitName(name)}")
                self._add(name, key, label, fields)
        except (SourceError, BadNameError) as error:  # invalid form of a sample, key or split
            raise BadSampleError(str(error)) from error

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Name the sample in errors, and end this writer if the disk fails."""
        try:
            yield
        except (BadSampleError, SourceError, BadNameError) as error:
            raise type(error)(f"sample {key!r:.200}: {error}") from error
        except OSError as error:
            self.abort()
            full = disk_full(error, self._journal.folder, _LOST)
            if full is None:
                raise
            raise full from error

    def _add(self, split: str, key: str, label: Any, values: Mapping[str, Any]) -> None:
        kinds = None if self._wanted is None else ({} if label is None else {"label": "label"}) | dict(self._wanted)
        form = self._form
        if form is None:
            form = SampleForm.of([values if label is None else {**values, "label": label}], kinds, self._classes)
        if form.target == "label":
            values, label = {**values, "label": label}, None
        known = (*form.members, *form.rest)
        unnamed = [name for name in values if kinds is not None and name not in kinds]
        if unnamed:
            raise BadSampleError(f"has no field {unnamed[0]!r}; it has {', '.join(known)}")
        number = form.label_of(values) if label is None else form.number(label)
        self._pack(split, key, number, form.payloads(values), form)

    def expect(self, samples: Sequence[Any], features: Mapping[str, Any] = {}) -> list[str]:
        """Examine the first samples for `write_sample`; returns warnings about their members.

        features: of a data set of Hugging Face. Raises SourceError, and BadSampleError if none is a sample.
        """
        if samples and self._form is None:
            self._form = SampleForm.of(samples, self._wanted, self._classes, features)
        return [] if self._form is None else self._form.warnings

    def write_sample(self, key: str, sample: Any) -> None:
        """Add a sample in the form of data sets, with its label inside. Raises the errors of `write`.

        Raises SourceError for a member whose kind is unknown.
        """
        form = self._form or SampleForm.of([sample], self._wanted, self._classes)
        with self._errors(key):
            split = self._options.split or "train"
            self._pack(split, key, form.label_of(sample), form.payloads(sample), form)

    def _pack(self, split: str, key: str, number: int, payloads: Sequence[Buffer | None], form: SampleForm) -> None:
        place = hash((split, key))
        if place in self._keys:
            raise BadSampleError("a sample with this key was written before; keys are unique in a split")
        self._form = form
        part = self._splits.setdefault(split, _Split())
        size = sum(len(payload) for payload in payloads if payload is not None)
        if part.open is not None and len(part.open.columns) and self._is_full(part, size):
            self._finish(split, part)
        if part.open is None:
            fields = self._options.packed_fields(form.fields)
            spec = ShardSpec(split, fields, form.classes, self._options.shards.label_offset)
            name, where = self._name(split, len(part.whole)), self._options.where or ""
            part.open = ShardPacker(self._journal.folder, name, spec, self._options, where)
        if not part.open.add(key, number, payloads, ("",) * len(payloads)):
            return
        part.bytes += size
        self._keys.add(place)
        self._count += 1

    def _is_full(self, part: _Split, size: int) -> bool:
        assert part.open is not None
        if self._options.shards.samples is not None:
            return len(part.open.columns) >= self._options.shards.samples
        return part.bytes + size > (self._options.shards.bytes or default_shard_bytes(1 << 62))

    @staticmethod
    def _name(split: str, number: int) -> str:
        """The name of a shard while the number of shards is unknown."""
        return f"{split}-{number:05d}.whole"

    def _finish(self, split: str, part: _Split) -> None:
        assert part.open is not None
        part.whole.append(part.open.finish(self._journal.work, self._name(split, len(part.whole))))
        part.open, part.bytes = None, 0

    # --- the end --------------------------------------------------------------------------------------------------
    def close(self) -> DatasetInfo:
        """Commit the set; after an OutputError, for example a full disk, this may be called again.

        Raises SourceError if no sample was written.
        """
        self._check_process()
        if self.info is None:
            if self._ended:
                raise OutputError(f"{self._journal.out}: this writer was aborted; make another one")
            try:
                self.info = self._commit()
            except (SourceError, UnknownNameError):
                self.abort()
                raise
            self._end()
        return self.info

    def abort(self) -> None:
        """Remove the written shards; an earlier set is kept."""
        if not self._ended and self._process == os.getpid():
            for part in self._splits.values():
                if part.open is not None:
                    part.open.abort()
            self._journal.remove()
            self._end()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise OutputError(
                f"{self._journal.out}: is written by process {self._process}, and process {os.getpid()} was forked "
                f"from it; write and close the set there, or end this one with os._exit()"
            )

    def _end(self) -> None:
        self._ended = True
        self._journal.close()

    def _commit(self) -> DatasetInfo:
        if self._form is None:
            raise SourceError(f"{self._journal.out}: no sample was written, so no set is made")
        shards: list[PlannedShard] = []
        specs, listed = {}, {}
        for split, part in self._splits.items():
            if part.open is not None and len(part.open.columns):
                self._finish(split, part)
            elif part.open is not None:  # its first sample was not packed
                part.open.abort()
                part.open = None
            count = len(part.whole)
            if not count:
                continue
            for number in range(count):
                self._rename(part, number, self._format.shard_name(split, number, count))
                shards.append(PlannedShard(split, part.whole[number].shard.path, range(0), 0))
            fields = self._options.packed_fields(self._form.fields)
            specs[split] = ShardSpec(split, fields, self._form.classes, self._options.shards.label_offset, count)
            listed[split] = ListingBuilder().build()
        self.metas = [meta for split in specs for meta in self._splits[split].whole]
        plan = Plan(tuple(shards), specs, self._fingerprint)
        self._journal.begin(plan, start_over=False)  # names the splits, for cleaning up after a kill
        old = replaced_set(self._journal)
        if old is not None:
            old.check(plan, ())
        form = self._form
        self.listing = SourceListing(listed, form.fields, form.classes, self.left_out, form.warnings)
        job = Job.of_plan(plan, self.listing, self._options, ("what was written", "", self._source))
        return job.finish(self._journal, self.metas, self._watcher)

    def _rename(self, part: _Split, number: int, final: str) -> None:
        """Give a complete shard its final name, unless an earlier call has done so."""
        meta = part.whole[number]
        name, work = meta.shard.path, self._journal.work
        if name != final:
            for suffix in ("", ".part"):
                if work.kind(name + suffix):
                    work.rename(name + suffix, final + suffix)
            part.whole[number] = replace(meta, shard=replace(meta.shard, path=final))

    def __enter__(self) -> SetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __len__(self) -> int:
        """Number of samples written so far."""
        return self._count


@takes_old_names
def writer(
    output: str | os.PathLike[str],
    to: str,
    *,
    fields: Mapping[str, str] | None = None,
    classes: Iterable[str] = (),
    split: str | None = None,
    images: Images = Images(),
    shards: Shards = Shards(),
    overwrite: bool = False,
) -> SetWriter:
    """A writer of a new set in the directory `output`, for use in a `with` statement.

    to: "hdf5", "tfrecord" or "tar".
    fields: name -> kind (`readers.fields`); by default the fields of the first sample, recognised by the values. Pass
        them if the first sample lacks some.
    classes: names of the classes; the position is the label.
    split: of samples that are written without one, default "train".
    images, shards: as for `packer.convert`, without shuffle.
    overwrite: replace the set in `output` when the block ends without an error.

    Memory: about 60 bytes per sample for the keys, and 100 per sample of a shard. Raises OutputError, ValueError.
    """
    refuse_others(shards, "size", "samples", "label_offset", "checksums")
    check_ops(images.ops)
    options = ConvertOptions(to, split, images=images, shards=shards)
    return SetWriter(local_output(output), options, fields, tuple(classes), overwrite=overwrite)


def convert_stream(samples: Iterable[Any], out: SetWriter, *, on_error: str, watcher: Watcher) -> None:
    """Write all samples of an iterable, with their numbers as keys.

    Raises BadSampleError if on_error="raise", and SourceError for a member whose kind is unknown.
    """
    watcher.begin(0, 0, lambda: (len(out), 0))
    try:
        waiting = iter(samples)
        first = list(itertools.islice(waiting, EXAMINED))
        for warning in out.expect(first, features_of(samples)):
            watcher.note(f"warning: {warning}")
        for number, sample in enumerate(itertools.chain(first, waiting)):
            try:
                out.write_sample(f"{number:09d}", sample)
            except BadSampleError as error:
                if on_error == "raise":
                    raise BadSampleError(
                        f"{error}; repair it, or leave such samples out with on_error='skip'"
                    ) from error
                out.left_out.append((f"sample {number}", str(error)))
    finally:
        watcher.end()
