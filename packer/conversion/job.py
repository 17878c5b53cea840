"""What it takes to make a set of whole shards, and the file that keeps it for `packer commit`.

`OUT/.packing/job.json`, written by the first task of several:

    tasks        how many there are
    title, root  of the source; source: the title as dataset.json has it
    to, on_error, options    of the conversion; options as dataset.json has them
    fingerprint  of the plan
    splits       [[name, folder of the source, shards], …]: the names of the shards follow
    fields, label_offset, classes, left_out, warnings, not_chosen    of the listing

`Job.finish` is the end of every conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cache.errors import OutputError, SourceError, UnknownNameError
from cache.files import Folder
from cache.messages import Watcher, plural, quoted
from packer import __version__
from packer.columns import PartMeta
from packer.conversion.commit import commit
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.conversion.options import ConvertOptions
from packer.conversion.plan import Plan, PlannedShard
from packer.conversion.result import count_by_action, refuse_nothing, refuse_unknown, refuse_unlike
from packer.conversion.saved import Prepared
from packer.formats import format_named
from packer.formats.base import ShardSpec
from packer.sources import Source
from packer.sources.base import ListingBuilder, SourceListing, stored_title
from readers.layout import DatasetInfo, FieldName, SplitName

__all__ = ["JOB_FILE", "Job", "load_job", "task_list"]

JOB_FILE = "job.json"
_VERSION = 2
_MAX_BYTES, _MAX_SHARDS = 1 << 30, 1 << 24


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion whose shards are packed: all but the samples. listing: may be without them."""

    plan: Plan
    listing: SourceListing
    to: str
    on_error: str
    options: Mapping[str, Any]
    title: str
    root: str
    source: str
    tasks: int = 1

    @classmethod
    def of(cls, source: Source, options: ConvertOptions, prepared: Prepared, tasks: int = 1) -> Job:
        """The job of a conversion that is listed and planned."""
        names = source.title, str(getattr(source, "root", "")), stored_title(source)
        return cls.of_plan(prepared.plan, prepared.listing, options, names, tasks)

    @classmethod
    def of_plan(
        cls, plan: Plan, listing: SourceListing, options: ConvertOptions, names: tuple[str, str, str], tasks: int = 1
    ) -> Job:
        """names: title and root of the source, and its title as dataset.json has it."""
        given = {name: value for name, value in options.to_json().items() if value is not None}
        return cls(plan, listing, options.to, options.on_error, given, *names, tasks)

    def finish(self, journal: Journal, metas: Sequence[PartMeta], watcher: Watcher) -> DatasetInfo:
        """Make the set of the shards, which are parallel to those of the plan. Raises SourceError for an empty one."""
        remarks = remarks_of(meta.remarks for meta in metas)
        for remark in remarks:
            watcher.note(f"warning: {remark}")
        try:
            refuse_unlike(self.title, metas)
            refuse_unknown(self.title, metas)
            refuse_nothing(self.title, self.root, self.listing, self.plan, metas)
        except (SourceError, UnknownNameError):
            journal.remove()
            with suppress(OSError):  # it still holds the old set
                journal.out.rmdir()
            raise
        made: dict[str, Any] = {
            "by": f"packer {__version__}",
            "source": self.source,
            "options": self.options,
            "plan": self.plan.fingerprint,
            "payload_bytes": sum(meta.payload_bytes for meta in metas),
            "left_out": count_by_action(metas),
            **({"remarks": list(remarks)} if remarks else {}),
        }
        return commit(journal, self.plan, metas, self.listing, self.to, made)

    def save(self, work: Folder) -> None:
        """Write the file into the working folder."""
        listing, specs = self.listing, self.plan.specs
        content = {
            "version": _VERSION,
            "tasks": self.tasks,
            "title": self.title,
            "root": self.root,
            "source": self.source,
            "to": self.to,
            "on_error": self.on_error,
            "options": self.options,
            "fingerprint": self.plan.fingerprint,
            "splits": [[name, part.root, specs[name].shards] for name, part in listing.splits.items()],
            "fields": dict(next(iter(specs.values())).fields if specs else listing.fields),
            "label_offset": next(iter(specs.values())).label_offset if specs else 0,
            "classes": listing.classes,
            "left_out": listing.left_out,
            "warnings": listing.warnings,
            "not_chosen": listing.not_chosen,
        }
        work.write(JOB_FILE, json.dumps(content).encode())

    def whole(self, journal: Journal) -> list[PartMeta]:
        """The facts of all shards. Raises OutputError where some are missing, with the tasks to run."""
        metas = [journal.load_whole(shard, self.plan, self.on_error) for shard in self.plan.shards]
        missing = [number for number, meta in enumerate(metas) if meta is None]
        if missing:
            tasks = sorted({number % self.tasks for number in missing})
            one = f"--task {tasks[0]}/{self.tasks}" + ("  and the others" if len(tasks) > 1 else "")
            raise OutputError(
                f"{journal.out}: {len(missing)} of {plural(len(metas), 'shard')} are missing, those of "
                f"{plural(len(tasks), 'task')} of {self.tasks}: run the same  packer convert … {one}  "
                f"again (of an array of Slurm: sbatch "
                f"--array={task_list(tasks)} SCRIPT), then  packer commit {quoted(journal.out)}"
            )
        return [meta for meta in metas if meta is not None]


def task_list(numbers: Sequence[int]) -> str:
    """Rising numbers as batch systems take them: 0,3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def load_job(work: Folder) -> Job | None:
    """The job whose tasks have packed into this folder; None without. Raises OutputError where it cannot be read."""
    if not work.kind(JOB_FILE):
        return None
    path = work.path / JOB_FILE
    try:
        return _parsed(json.loads(work.read(JOB_FILE, _MAX_BYTES)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OutputError(f"{path}: cannot be read ({error!r:.200}); run any of its tasks again") from error


def _parsed(given: dict[str, Any]) -> Job:
    if given["version"] != _VERSION:
        raise ValueError(f"version {given['version']}, this packer reads {_VERSION}")
    splits = [(SplitName(name), str(root), int(count)) for name, root, count in given["splits"]]
    if not 0 <= sum(count for _, _, count in splits) <= _MAX_SHARDS or min(count for _, _, count in splits) < 0:
        raise ValueError("numbers of shards that no set has")
    tasks = int(given["tasks"])
    if tasks < 1:
        raise ValueError(f"{tasks} tasks")
    fields = {str(FieldName(name)): str(kind) for name, kind in given["fields"].items()}
    listing = SourceListing(
        {name: ListingBuilder(len(fields)).build(root) for name, root, _ in splits},
        fields,
        tuple(map(str, given["classes"])),
        [(str(path), str(reason)) for path, reason in given["left_out"]],
        list(map(str, given["warnings"])),
        not_chosen=int(given["not_chosen"]),
    )
    container, offset = format_named(str(given["to"])), int(given["label_offset"])
    specs: dict[str, ShardSpec] = {
        name: ShardSpec(name, fields, listing.classes, offset, count) for name, _, count in splits
    }
    shards = tuple(
        PlannedShard(name, container.shard_name(name, number, count), range(0), 0)
        for name, _, count in splits
        for number in range(count)
    )
    plan = Plan(shards, specs, str(given["fingerprint"]))
    options = dict(given["options"])
    title, root = str(given["title"]), str(given["root"])
    return Job(plan, listing, container.name, str(given["on_error"]), options, title, root, str(given["source"]), tasks)
