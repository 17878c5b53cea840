"""The words in usage lines, and the examples at the end of each command's --help: what for, and the line to type.

Names in them mean the same everywhere: images is a folder of images, images-hdf5 (-tar, -tfrecord) a set made of it.
"""

from __future__ import annotations

import click

__all__ = ["EXAMPLES", "WORDS", "show_examples", "words_text"]

WORDS = {
    "SET": "a packed set: its directory, or its address (s3://, https://, …)",
    "SOURCE": "what can be packed: a folder, an archive, a table, a set, …",
    "SHARD": "a shard that other programs have made, or a directory of them",
    "OUT": "where a new set goes",
    "DIR": "a directory of this machine",
    "FILE": "a file of this machine",
    "SPLIT": "a part of a set, as train",
    "SIZE": "bytes, as 256MiB or 1GB; some options take a share, as 30%",
    "RATE": "bytes a second, as 200MB/s",
    "TIME": "a duration, as 20ms or 1.5s",
    "I/N": "number I, from 0, of N",
}

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "convert": (
        ("pack a folder into images-hdf5", "packer convert images --to hdf5"),
        ("an archive as it is, and smaller images", "packer convert images.tar --to tar -o small --max-side 512"),
        ("how large, how long, how many files", "packer convert images --to hdf5 -o try --dry-run"),
        ("task 3 of an array of 16", "packer convert images --to tar -o /scratch/set --task 3/16"),
    ),
    "commit": (
        ("when all tasks are done", "packer commit /scratch/set"),
        ("for a script", "packer commit /scratch/set --json"),
    ),
    "index": (
        ("read WebDataset shards where they are", "packer index shards --image-key 'jpg;png' --label-key cls"),
        ("the set elsewhere, with links", "packer index shards -o set --split train"),
        ("rebuild the index of a set", "packer index images-tar"),
    ),
    "reshard": (
        ("one set as another container", "packer reshard images-hdf5 --to tar -o images-tar2"),
        ("drop unused bytes, in place", "packer reshard images-hdf5 --shard-size 1GiB"),
    ),
    "append": (
        ("more images into the same splits", "packer append images-hdf5 more"),
        ("a folder without splits, known keys skipped", "packer append images-hdf5 new --split train --existing skip"),
    ),
    "merge": (
        ("one set of two, without copying", "packer merge images-hdf5 other-hdf5 -o both"),
        ("keys that both have", "packer merge images-hdf5 other-hdf5 -o both2 --prefix-keys"),
    ),
    "split": (
        ("hold out a tenth, by class", "packer split images-hdf5 --fractions train=0.9,val=0.1 --stratify -o dealt"),
        ("try it", "packer split images-hdf5 --fractions a=0.5,b=0.5 --seed 1 --dry-run"),
    ),
    "subset": (
        ("a hundred images of each split", "packer subset images-hdf5 -o hundred --limit 100 --seed 0"),
        ("large images only", "packer subset images-hdf5 -o large --where 'min_side >= 224'"),
        ("those of a list", "packer subset images-hdf5 -o listed --keys keys.txt"),
    ),
    "drop": (
        ("samples of a list", "packer drop images-hdf5 --keys keys.txt"),
        ("tiny images, into a new set", "packer drop images-hdf5 --where 'min_side < 32' -o kept"),
    ),
    "erase": (
        ("what it would remove", "packer erase images-hdf5 --keys keys.txt --dry-run"),
        ("the images of a list", "packer erase images-hdf5 --keys keys.txt"),
    ),
    "relabel": (
        ("another name for a class", "packer relabel images-hdf5 --map cat=felis"),
        ("labels from a table", "packer relabel images-hdf5 labels.csv -o relabelled"),
    ),
    "dedup": (
        ("what is there twice", "packer dedup images-hdf5 --dry-run"),
        ("also resized copies; keep those of train", "packer dedup images-hdf5 --near 6 --prefer train -o unique"),
    ),
    "add-field": (
        ("a mask for each image, named by its key", "packer add-field images-hdf5 masks --name mask"),
        ("captions in text files", "packer add-field images-hdf5 captions --name caption --kind text"),
    ),
    "prune": (
        ("what would go", "packer prune images-hdf5 --dry-run"),
        ("remove it", "packer prune images-hdf5"),
    ),
    "inspect": (
        ("splits, classes, sizes, duplicates", "packer inspect images-hdf5"),
        ("for a script", "packer inspect images-hdf5 --json"),
        ("a set in an object store", "packer inspect s3://bucket/images-hdf5"),
    ),
    "view": (
        ("a set, in the browser of this machine", "packer view images-hdf5"),
        ("a folder, as it is", "packer view images"),
        ("a set in an object store", "packer view s3://bucket/images-hdf5"),
        ("a page to put beside the set", "packer view images-hdf5 --export page"),
    ),
    "verify": (
        ("every checksum", "packer verify images-hdf5"),
        ("also decode, and compare with the originals", "packer verify images-hdf5 --deep --against images"),
        ("a set in an object store", "packer verify s3://bucket/images-hdf5"),
    ),
    "extract": (
        ("the original tree", "packer extract images-hdf5 -o back"),
        ("one class of one split", "packer extract images-hdf5 -o cats --split train --keys 'cat/*'"),
    ),
    "export-index": (
        ("files for DALI's own reader", "packer export-index images-tar --for dali"),
        ("for the package tfrecord", "packer export-index images-tfrecord --for tfrecord -o indexes"),
    ),
    "stage": (
        ("in a batch script", "DATA=$(packer stage images-hdf5 --target '$SLURM_TMPDIR')"),
        ("around a training", "packer stage images-hdf5 --cleanup atexit -- python train.py"),
        ("from an object store, one split", "packer stage s3://bucket/images-hdf5 --split train"),
        ("what is staged here; remove what is unused", "packer stage ls && packer stage clean"),
    ),
    "stage ls": (("on the usual disks", "packer stage ls"), ("on this one", "packer stage ls --target /local")),
    "stage clean": (
        ("all copies not in use", "packer stage clean"),
        ("those of one set; say only", "packer stage clean images-hdf5 --dry-run"),
    ),
    "serve": (
        ("on each node, around the training", "packer serve images-hdf5 shared -- python train.py"),
        ("node 2 of 8, with a memory cache", "packer serve images-hdf5 shared --part 2/8 --cache 20GiB"),
    ),
    "cache": (
        ("what this node keeps", "packer cache ls"),
        ("fill one before the job", "packer cache warm images-hdf5 --capacity 20GiB"),
        ("remove those that jobs left", "packer cache clean"),
    ),
    "cache ls": (("job, set, size, hits, users", "packer cache ls"), ("for a script", "packer cache ls --json")),
    "cache stats": (
        ("every cache in full", "packer cache stats"),
        ("those of one set", "packer cache stats images-hdf5"),
    ),
    "cache warm": (
        ("the whole set, or what memory allows", "packer cache warm images-hdf5"),
        ("as small JPEGs", "packer cache warm images-hdf5 --split train --keep recoded:256@90"),
    ),
    "cache clean": (
        ("what no process uses", "packer cache clean"),
        ("also caches that persist", "packer cache clean --all"),
    ),
    "advise": (
        ("what to pack for steps of 50 ms", "packer advise images --simulate-step 50ms --batch-size 64"),
        ("what DALI would read", "packer advise images --reader dali --max-side 512 --max-side 384"),
    ),
    "order": (
        ("bytes read and mixing", "packer order images-hdf5"),
        ("for slow storage", "packer order images-hdf5 --block-bytes 32MiB --window 16 --window 64"),
    ),
    "simulate": (
        ("32 nodes with 8 GPUs", "packer simulate images-hdf5 --nodes 32 --ranks 8 --step 250ms"),
        ("before the set exists", "packer simulate --samples 1281167 --mean-bytes 110kB --nodes 4 --cache 64GiB"),
    ),
    "parity": (
        ("pixels of all decoders here", "packer parity images-hdf5"),
        ("on a GPU, fewer images", "packer parity images-hdf5 --device cuda --samples 50"),
    ),
    "diagnose": (
        ("your loader and your step", "packer diagnose train.py:make_loader --step train.py:train_step"),
        ("a set, without a GPU", "packer diagnose images-hdf5 --simulate-step 20ms"),
        ("two runs", "packer diagnose --compare before.jsonl after.jsonl"),
    ),
    "monitor": (
        ("a table when it ends", "packer monitor -- python train.py"),
        ("a record to compare", "packer monitor --output before.jsonl -- python train.py"),
    ),
    "doctor": (
        ("what works here, what is missing", "packer doctor"),
        ("and whether sets can be written there", "packer doctor /tmp"),
    ),
    "completion": (
        ("for the shell of $SHELL", "packer completion"),
        ("look at the script first", "packer completion zsh --print"),
    ),
}


def words_text() -> str:
    """The words as lines for a help text."""
    return "\n".join(["\b", "Words:", *(f"  {word:8}{meaning}" for word, meaning in WORDS.items())])


def show_examples(command: click.Command, path: str) -> None:
    """Add the examples to the help of a command and of those below it."""
    for name, part in command.commands.items() if isinstance(command, click.Group) else ():
        show_examples(part, f"{path} {name}")
    lines = [line for what, example in EXAMPLES.get(path, ()) for line in (f"  # {what}", f"  {example}")]
    if lines and not command.epilog:
        command.epilog = "\n".join(["\b", "Examples:", *lines])
