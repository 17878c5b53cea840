"""The command line as a user meets it: words, examples, results, JSON, errors, statuses, logs, progress, Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import Packer, files_of, make_jpeg, tree_of
from image_cases import encoded, picture
from suites.programs import run_packer

import packer as library
import readers
from cache.messages import bar, human_bytes, human_seconds, json_printable, parse_size, plural, printable
from packer.cli.flags import Emphasis, show
from packer.cli.group import COMMANDS as ENTRIES
from packer.cli.group import WORDS, cli
from packer.cli.screen import ProgressDisplay, progress_line
from packer.inspection import compare_orders
from readers.feed import Feed, FeedOptions, Start
from readers.order import Shuffled

PACKER = [sys.executable, "-m", "packer"]


def output(*arguments: object, **options: Any) -> str:
    """The output of a successful command."""
    done = run_packer(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the main commands ----------------------------------------------------------------------------------------------
def test_the_main_job(tree: Path, tmp_path: Path) -> None:
    done = run_packer("convert", tree, "--to", "hdf5", "--workers", 2, cwd=tmp_path)
    assert done.stdout.startswith("images-hdf5: 45 samples (train 36, val 9), 3 classes, "), done.stderr
    assert "in 2 hdf5 shards" in done.stdout and f"listing folder {tree}" in done.stderr
    checked = output("verify", "images-hdf5", "--deep", "--against", tree, cwd=tmp_path)
    assert checked.startswith("images-hdf5: OK: 45 samples")
    shown = output("inspect", "images-hdf5", cwd=tmp_path)
    for text in ("hdf5 set, 3 classes", "train: 36 samples in 1 shard", "cat", "median", "duplicates: none"):
        assert text in shown
    assert output("extract", "images-hdf5", "-o", "back", cwd=tmp_path).startswith("back: 45 files")
    assert files_of(tmp_path / "back") == files_of(tree)
    again = output("index", "images-hdf5", cwd=tmp_path)
    assert again.startswith("images-hdf5: 45 samples (train 36, val 9) in 2 hdf5 shards")


def test_damage_is_named_and_exits_with_1(tree: Path, tmp_path: Path) -> None:
    done = run_packer("convert", tree, "--to", "tar", "-o", tmp_path / "set", "--json", "--samples-per-shard", 12)
    value = json.loads(done.stdout)
    assert (value["samples"], value["shards"], value["format"], done.stderr) == (45, 4, "tar", "")
    shard = tmp_path / "set/val-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = run_packer("verify", tmp_path / "set")
    assert done.returncode == 1 and done.stdout.startswith("DAMAGED val: val-000000.tar:")
    assert json.loads(run_packer("verify", tmp_path / "set", "--json").stdout)["ok"] is False


def test_orders_are_compared(packed: Path) -> None:
    shown = output("order", packed, "--split", "train", "--block-bytes", "4KiB", "--window", 2)
    for text in ("stored order", "2 blocks", "global shuffle", "16.4 kB", "GETs a", "1 batch"):
        assert text in shown
    reports = json.loads(output("order", packed, "--split", "val", "--json"))["orders"]
    names = ["stored order", "16 blocks", "64 blocks", "256 blocks", "woven, 256 open", "global shuffle"]
    assert [report["name"] for report in reports] == names
    assert all(report["amplification"]["1048576"] >= 1 for report in reports) and reports[-1]["quality"] == 1
    assert "Recommended: order = readers.order." in shown and "measured" in shown
    rates = ("--bandwidth", "1GB", "--latency", 20)
    for more, name in ((("--memory", "1GB"), "woven"), (("--memory", "1B"), "Shuffled"), (("--need", 1), "Shuffled")):
        advice = json.loads(output("order", packed, "--split", "train", "--json", *rates, *more))
        assert advice["measured"] is False and advice["latency_s"] == 0.02
        if name == "Shuffled":
            assert "readers.order.Shuffled" in advice["use"] and "nothing mixes better" in advice["reason"]
    assert all(order["samples_s"] > 0 and order["first_batch_s"] >= 0.02 for order in advice["orders"])
    with pytest.raises(ValueError, match="latency_s is 0"):
        library.recommend_order(packed, "train", latency_s=0)
    with readers.open(packed, "train") as reader:
        memory = {report.memory_bytes for report in compare_orders(packed, "train")}
        assert memory == {0, int(reader.sizes().sum())}, "an order reports more memory than the split has bytes"


def test_a_cache_from_warm_to_clean(packed: Path, tmp_path: Path) -> None:
    """A path that is too long for the table is shown by its end."""

    def cached(*arguments: object) -> str:
        return output("cache", *arguments, "--target", tmp_path)

    warmed = json.loads(cached("warm", packed, "--split", "val", "--json"))
    assert (warmed["split"], warmed["samples"], warmed["present"]) == ("val", 9, 9)
    again = json.loads(cached("warm", packed, "--split", "val", "--json"))
    assert again["present"] == 9 and again["used_bytes"] == warmed["used_bytes"]
    cached("clean", "--all")
    done = cached("warm", packed, "--capacity", "50%", "--keep", "decoded:16")
    assert "18 of 36 samples of train kept as decoded-resize_size_16" in done and "samples/s" in done
    with readers.open(packed, "train") as base:
        reader = readers.cached(base, 0.5, "decoded:16", persist=True, directory=tmp_path)
        assert reader.stats().present == 18
        reader.read_many(range(36))
        listed = cached("ls")
        for text in ("decoded-resize_size_16 image", "set (train)", "50%", "█", "python", "job", "\n0  "):
            assert text in listed, listed
        assert cached("clean", "--all").startswith(f"{tmp_path}: 0 caches removed"), "the cache in use was removed"
        reader.close()
    (report,) = json.loads(cached("ls", "--json"))
    assert (report["hits"], report["passed"], report["hit_rate"], report["persist"]) == (18, 18, 0.5, True)
    assert report["users"] == [] and report["set"].endswith("/train") and report["title"] == f"{packed} (train)"
    shown = cached("stats", f"{packed.name} (tr")
    for text in (f"set      {packed} (train)", "job      0", "36: 18 hits", "18 passed through",
                 "persists when unused", "state    unused"):  # fmt: skip
        assert text in shown
    assert "unused, persists" in cached("ls") and json.loads(cached("clean", "--json")) == []
    kept = cached("clean", packed)
    assert "0 caches removed" in kept and f"kept {report['name']}: persists; --all removes it" in kept
    assert "1 cache would be removed" in cached("clean", packed, "--all", "--dry-run")
    assert "no cache 'other'" in run_packer("cache", "clean", "other", "--target", tmp_path).stderr
    gone = cached("clean", packed, "--all")
    assert "1 cache removed" in gone and report["name"] in gone
    assert cached("ls") == cached("stats") == f"{tmp_path}: no caches\n"
    deep = tmp_path / ("long" * 40)
    deep.mkdir()
    (deep / "set").symlink_to(packed)
    with readers.open(deep / "set", "val") as base:
        readers.cached(base, "1MiB", persist=True, directory=tmp_path, job="job-1").close()
    header, line = cached("ls").splitlines()
    assert header.split()[:2] == ["job", "set"] and line.startswith("job-1  ") and "set (val)" in line
    assert str(deep)[:40] not in line and cached("stats", "longlong").count("long" * 40) == 1


def test_numbers_and_names_in_output() -> None:
    sizes = ["0 B", "999 B", "1.34 kB", "55 MB", "1.5 TB"]
    assert [human_bytes(x) for x in (0, 999, 1340, 55_039_085, 1.5e12)] == sizes
    assert [human_seconds(x) for x in (0.44, 12.3, 185, 7800)] == ["0.4 s", "12 s", "3:05 min", "2:10 h"]
    assert [bar(x, 4) for x in (0, 1e-6, 0.5, 1)] == ["", "▏", "██", "████"]
    assert [parse_size(x) for x in ("1GiB", "256MB", "4096B", "1.5k", "0")] == [1 << 30, 256_000_000, 4096, 1500, 0]
    assert printable("a\tb\nü…") == "a\tb\nü…"
    assert printable("\x1b\x00\x7f\x9b\u202e\udcff") == r"\x1b\x00\x7f\x9b\u202e\udcff"
    assert json.loads(json_printable(json.dumps("\x9b\u202e", ensure_ascii=False))) == "\x9b\u202e"
    counts = [plural(1, "shard"), plural(2, "class"), plural(0, "match"), plural(1000, "copy"), plural(3, "day")]
    assert counts == ["1 shard", "2 classes", "0 matches", "1,000 copies", "3 days"]


# --- help and examples ----------------------------------------------------------------------------------------------
def commands(command: click.Command = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its path, as "cache warm"; `packer stage SET` runs a hidden command that is called "stage"."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        part = command.get_command(context, name)
        assert part is not None
        yield from commands(part, path if part.hidden else f"{path} {name}".strip())


COMMANDS = dict(commands())
PATHS = sorted({*COMMANDS, "cache", ""})


@pytest.mark.parametrize("path", PATHS)
def test_every_command_has_help_with_examples_and_suggests_corrections(path: str, cli_run: Packer) -> None:
    """Help fits a terminal; an error is JSON on request, and without --json stdout has results only."""
    status, shown, _ = cli_run(*path.split(), "--help")
    assert status == 0 and [line for line in shown.splitlines() if len(line) > 80 or "docs/" in line] == []
    if path:
        assert shown.index("Examples:") > shown.index("--help") and 2 <= len(ENTRIES[path].examples) <= 4
    if path not in COMMANDS:
        return
    assert "--json" in shown and "--verbose" in shown
    status, out, err = cli_run(*path.split(), "--jsn", "--json")
    error = json.loads(out)["error"]
    assert (status, error["status"], error["type"]) == (2, 2, "UsageError") and "Traceback" not in err
    assert "--json" in error["message"].partition("--jsn")[2], error["message"]
    assert cli_run(*path.split(), "--jsn")[1] == ""


def test_every_command_is_in_the_help_once(cli_run: Packer) -> None:
    shown = cli_run("--help")[1]
    for name in cli.list_commands(click.Context(cli)):
        assert len(re.findall(rf"^  {name} ", shown, re.MULTILINE)) == 1
    assert all(re.search(rf"^ +{word} ", shown, re.MULTILINE) for word in WORDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that the examples name, and inputs on which commands fail."""
    root = tmp_path_factory.mktemp("examples")
    splits = {"train": range(4), "val": range(4, 8)}
    names = [f"{split}/{name}/{n}.jpg" for split, numbers in splits.items() for name in ("cat", "dog") for n in numbers]
    tree_of(root / "images", {name: make_jpeg(seed, (240, 224)) for seed, name in enumerate(names)})
    tree_of(root, {
        "more/train/cat/19.jpg": make_jpeg(50), "new/cat/18.jpg": make_jpeg(51),
        "other/train/owl/17.jpg": make_jpeg(52), "captions/cat/0.txt": b"a cat",
        "masks/cat/1.png": encoded(picture(48, 64).convert("L"), "PNG"),
        "train.py": b"", "before.jsonl": b"{}", "after.jsonl": b"{}", "keys.txt": b"dog/3\n",
        "labels.csv": b"key,label\ncat/0,dog\n", "bad/a/1.jpg": b"no image",
    })  # fmt: skip
    (root / "memory").mkdir()
    shutil.make_archive(str(root / "images"), "tar", root / "images")
    for source, to in (("images", "hdf5"), ("images", "tar"), ("images", "tfrecord"), ("other", "hdf5")):
        library.convert(root / source, to, root / f"{source}-{to}", run=library.Run(workers=1))
    with readers.open(root / "images-hdf5") as reader:
        options = FeedOptions(0, 1, made={"ops": [["RandomHorizontalFlip()"]]})
        feed = Feed(reader, Shuffled(len(reader)), 2, options).joined(Start(), 0)
    for name in ("state.json", "last.ckpt"):
        (root / name).write_text(json.dumps(feed.token(Start(0, 4))))
    shutil.copytree(root / "images-tar", root / "shards", ignore=shutil.ignore_patterns("*.json", "*.index", "*.md"))
    return root


EXAMPLE_LINES = [
    (path, shlex.split(line, comments=True))
    for path, entry in ENTRIES.items()
    if path in PATHS
    for _, text in entry.examples
    for line in re.findall(r"packer [^)&]+", text)
]
# Commands that are only parsed: they need another machine, a training job or much time, or change this machine.
PARSED = ("commit", "diagnose", "monitor", "serve", "simulate", "advise", "completion", "doctor", "parity", "view")


def is_run(path: str, words: list[str]) -> bool:
    text = " ".join(words)
    elsewhere = any(part in text for part in ("s3://", "--task", "-- python", "$SLURM", "/local", "/scratch", "--html"))
    return path.partition(" ")[0] not in (*PARSED, "cache", "stage") and not elsewhere


def test_examples_are_commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself parses them: options, numbers of arguments, values, files that must exist."""
    monkeypatch.chdir(place)
    for words in (words for path, words in EXAMPLE_LINES if not is_run(path, words)):
        name, *arguments = words[1:]
        command: click.Command = cli.get_command(click.Context(cli), name)  # type: ignore[assignment]
        context = click.Context(cli, info_name="packer")
        while isinstance(command, click.Group):
            context = command.make_context(name, arguments, context)
            known = vars(context)  # the name of click 8.1 comes second
            first = known["_protected_args"] if "_protected_args" in known else known["protected_args"]
            name, command, arguments = command.resolve_command(context, [*first, *context.args])
        assert command.make_context(name, arguments, context).params, words


def test_examples_run(place: Path, tmp_path: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, with the set restored; on one CPU, so that no process is started."""
    failed = {}
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        lines = [words[1:] for path, words in EXAMPLE_LINES if is_run(path, words)]
        for words in lines:
            shutil.rmtree("images-hdf5")
            shutil.copytree(place / "images-hdf5", "images-hdf5")
            status, out, err = cli_run(*words)
            if status:
                failed[" ".join(words)] = out + err
    finally:
        os.sched_setaffinity(0, cpus)
    assert len(lines) > 30 and not failed, "\n".join(f"{line}\n   {error}" for line, error in failed.items())


# --- errors and statuses --------------------------------------------------------------------------------------------
NO_SET = "not a packed set (no dataset.json); make one with  packer convert"


@pytest.mark.parametrize(
    ("line", "status", "kind", "text"),
    [
        ("convert bad --to tar -o {out}", 1, "BadSampleError", "a/1.jpg: "),
        ("convert bad --to tar -o {out}", 1, "BadSampleError", "--on-error skip or --on-error quarantine"),
        ("convert images -o images-hdf5 --to tar", 1, "OutputError", "pass --overwrite to replace it"),
        ("convert nowhere --to tar", 2, "UsageError", "Path 'nowhere' does not exist"),
        ("convert bad --to lmdb", 2, "UsageError", "'lmdb' is not one of 'hdf5', 'tfrecord', 'tar' (h5 for hdf5, "),
        ("convert bad --to tar --shard-size big", 2, "UsageError", "'big' is not a valid size; write it as 256MiB"),
        ("convert bad --shard-size 100", 2, "UsageError", "'100' has no unit: 100B, 100MiB or 100GiB?"),
        ("diagnose bad --simulate-step 20", 2, "UsageError", "'20' has no unit: 20ms or 20s?"),
        ("convert bad --to tar --max-side 9 --resize-short 9", 2, "UsageError", "exclude each other"),
        ("convert images-tar --to hdf5 --split test", 1, "UnknownNameError", "no split 'test'; it has train, val"),
        ("index bad", 1, "SourceError", "no shards found"),
        ("index bad/a/1.jpg", 1, "FormatError", "1.jpg"),
        ("inspect bad", 1, "DatasetError", NO_SET),
        ("verify bad", 1, "DatasetError", NO_SET),
        ("extract bad -o {out}", 1, "DatasetError", NO_SET),
        ("export-index bad --for dali", 1, "DatasetError", NO_SET),
        ("order bad", 1, "DatasetError", NO_SET),
        ("stage bad --target {out}", 1, "DatasetError", NO_SET),
        ("cache warm bad --target memory", 1, "DatasetError", NO_SET),
        ("cache warm images-tar --capacity lots --target memory", 2, "UsageError", "'lots' is not a valid size"),
        ("cache warm images-tar --keep gold --target memory", 2, "UsageError", "keep is encoded, recoded:SIDE"),
        ("cache warm images-tar --capacity 10B --target memory", 1, "OutputError", "of 10 bytes keeps no sample"),
        ("cache warm images-tar --split test --target memory", 1, "UnknownNameError", "no split 'test'; it has train"),
        ("cache stats nothing --target memory", 1, "UnknownNameError", "no cache 'nothing'; it has none"),
        ("cache ls --target nowhere", 2, "UsageError", "'nowhere' does not exist"),
        ("cache lss", 2, "UsageError", "No such command 'lss'."),
        ("verfy images-hdf5", 2, "UsageError", "No such command 'verfy'. Did you mean verify?"),
        ("frobnicate", 2, "UsageError", "No such command 'frobnicate'."),
        ("list", 2, "UsageError", "Did you mean inspect?"),
        ("verify", 2, "UsageError", "Missing argument 'SET'"),
        ("extract images-hdf5 -o images --workers 1 --keys 'nothing/*'", 1, "UnknownNameError", "nothing/*"),
        ("subset images-hdf5 -o x", 2, "UsageError", "select samples"),
        ("subset images-hdf5 -o x --where nonsense", 2, "UsageError", "nonsense"),
        ("stage images-hdf5 --bandwidth fast", 2, "UsageError", "'fast'"),
    ],
)
def test_a_failure_is_one_clear_message_and_json_on_request(
    line: str, status: int, kind: str, text: str, place: Path, tmp_path: Path, cli_run: Packer, monkeypatch: Any
) -> None:
    monkeypatch.chdir(place)
    code, out, err = cli_run(*shlex.split(line.format(out=tmp_path / "out")), "--json")
    error = json.loads(out)["error"]
    assert (code, error["status"], error["type"]) == (status, status, kind), err
    assert text in error["message"] and text in err.replace("\n", " ") and "Traceback" not in err
    assert not list((place / "memory").iterdir()) and not (tmp_path / "out/dataset.json").exists()


def test_no_command_shows_usage_and_monitor_returns_the_status_of_its_command(cli_run: Packer) -> None:
    status, out, err = cli_run()
    assert status in (0, 2) and "Usage: packer" in out + err  # 0: click 8.1
    status, _, err = cli_run("convert", "images", "--to")
    assert status == 2 and "Usage: packer convert" in err and "an argument. --to [hdf5|tfrecord|tar]" in err
    assert run_packer("monitor", "--", "false").returncode == 1


def test_an_unexpected_error_is_one_line_that_says_how_to_report_it(
    tmp_path: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> None:
        raise raised

    monkeypatch.setattr("packer.cli.look.inspect", broken)
    raised: Exception = ZeroDivisionError("by zero")
    status, _, err = cli_run("inspect", tmp_path)
    assert status == 1 and "Traceback" not in err
    assert "unexpected ZeroDivisionError: by zero; this is a defect of packer" in err
    monkeypatch.setenv("PACKER_TRACEBACK", "1")
    assert "Traceback" in cli_run("inspect", tmp_path)[2]
    raised = AttributeError("module 'readers' has no x")
    assert "another package may have overwritten" in cli_run("inspect", tmp_path)[2]


@pytest.mark.parametrize("stage", ["numpy", "packer.cli.convert"])
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(tree: Path, tmp_path: Path, stage: str) -> None:
    """Interrupted in the middle of importing `stage`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {stage!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    line = ("convert", tree, "--to", "hdf5", "-o", tmp_path / "out")
    done = run_packer(*line, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "packer: interrupted; run the same command again to continue"
    assert "Traceback" not in done.stderr


def test_ctrl_c_again_and_again_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    tree_of(tmp_path / "in", {f"{number % 3}/{number}.jpg": make_jpeg(number % 7) for number in range(300)})
    line = [*PACKER, "convert", tmp_path / "in", "--to", "tar", "-o", tmp_path / "out", "--samples-per-shard", "1"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        first = child.stderr.readline()
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        rest = child.stderr.read()
    assert "listing" in first and "Traceback" not in rest and child.returncode == 130, rest


def test_closed_full_and_broken_streams(tree: Path, packed: Path, tmp_path: Path) -> None:
    """A shard never gets the descriptor of a closed stream."""
    for command, status, message in (
        (f"verify {packed} >&-", 0, ""),
        (f"convert {tree} --to hdf5 -o {tmp_path / 'out'} >&- 2>&-", 0, ""),
        (f"inspect {packed} >/dev/full", 1, "packer: No space left on device; "),
        (f"inspect {packed} --json | head -c 1", 0, ""),
    ):
        line = f"{shlex.join(PACKER)} {command}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == status and done.stderr.startswith(message), (command, done.stderr)
        assert not re.search("Traceback|Exception|BrokenPipe", done.stderr), done.stderr
    assert library.verify(tmp_path / "out", deep=True, workers=1).ok


def test_a_limit_of_file_sizes_is_named_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    tree_of(tmp_path / "in", {f"a/{number}.jpg": make_jpeg(number, (256, 256)) for number in range(40)})
    done = run_packer(
        *("convert", tmp_path / "in", "--to", "hdf5", "-o", tmp_path / "out", "--workers", 1),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and str(tmp_path / "out") in last, done.stderr
    assert "File too large" in last and "run the same command again" in last, done.stderr


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egpj.exe\x9b31m"


def test_names_of_files_and_classes_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    files = {f"{HOSTILE}/{HOSTILE}.jpg": make_jpeg(1), "b/1.jpg": make_jpeg(2), "b/2.jpg": b""}
    convert, out = ("convert", tree_of(tmp_path / "in", files), "--to", "tar", "-o"), tmp_path / f"x{HOSTILE}"
    outputs = [
        run_packer(*convert, out),
        run_packer(*convert, out, "--on-error", "skip"),
        run_packer("convert", tmp_path / HOSTILE, "--to", "tar"),
        run_packer("inspect", out),
        run_packer("inspect", out, "--json"),
        run_packer("extract", out, "-o", tmp_path / "back"),
    ]
    assert [done.returncode for done in outputs] == [1, 0, 2, 0, 0, 0], [done.stderr for done in outputs]
    for text in (text for done in outputs for text in (done.stdout, done.stderr)):
        assert not set(text) & set("\x1b\x07\u202e\x9b"), repr(text)
    assert "\\x1b[2J" in outputs[3].stdout
    assert HOSTILE in json.loads(outputs[4].stdout)["classes"], "JSON does not have the exact names"


# --- terminals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [1, 10, 20, 41, 62, 80, 139, 300])
def test_the_progress_line_is_narrower_than_the_terminal(columns: int) -> None:
    """A part of the line that does not fit is left out as a whole."""
    line = progress_line(1_281_167, 140_000_000_000, (640_000, 70_000_000_000, 12), 3000.0, columns)
    assert len(line) < columns
    parts = (" 50%", "640,000/1,281,167 samples", "213/s", "12 left out", "23.3 MB/s", "50:00 min left")
    assert all(part in line for part in parts) == (columns >= 80), line
    if columns >= 20:
        rest = re.sub(r"^[█░]{4,24}  ", "", line)
        for part in sorted(parts, key=len, reverse=True):
            rest = rest.replace(part, "", 1)
        assert line.endswith("left") or columns < 62, line
        assert set(rest) <= {" ", ","} and "50%" in line, line
    assert progress_line(0, 0, (50, 0, 3), 2.0) == "50 samples, 25/s, 3 left out  2.0 s"


class Terminal:
    """A terminal of some columns: its stream, a function that resizes it, and its output."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        self.stream = os.fdopen(self._theirs, "w", encoding="utf-8")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def sent(self) -> str:
        """The output so far; a terminal may take a moment to deliver it."""
        self.stream.write("\0")
        self.stream.flush()
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._ours, 1 << 16)
        return text[:-1].decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    opened.resize(100)
    yield opened
    opened.close()


@pytest.mark.parametrize(("columns", "then"), [(20, 300), (300, 20), (33, 33)])
def test_a_bar_fits_the_terminal_also_after_a_resize(columns: int, then: int, terminal: Terminal) -> None:
    terminal.resize(columns)
    counts = iter([(640_000, 70_000_000_000, 3), (640_001, 70_000_000_001, 4)])
    over = threading.Event()

    def done() -> tuple[int, int, int]:
        count = next(counts, None)
        if count is None:
            over.set()
            return 640_002, 70_000_000_002, 5
        if count[2] == 4:
            terminal.resize(then)  # after the width was read for this line
        return count

    display = ProgressDisplay(terminal.stream)
    display.begin(1_281_167, 140_000_000_000, done)
    assert over.wait(300)
    display.note("a note \x1b[2J")
    display.end()
    shown = terminal.sent()
    first, second, third = [line for line in re.split(r"\r\x1b\[K|\r?\n", shown) if "%" in line][:3]
    assert len(first) < columns and len(second) < columns and len(third) < then, (first, second, third)
    assert "50%" in first and "50%" in third
    for line, size in ((first, columns), (third, then)):
        assert ("left out" in line) == (size > 70) and ("█" in line) == (size == 300), line
    assert "\r\x1b[Kpacker: a note \\x1b[2J\r\n" in shown and "\x1b[2J" not in shown, "a note shares its line"


def test_colours_are_only_for_terminals_that_allow_them(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    for name, value, coloured in (("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "xterm", True)):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm")
            patch.setenv(name, value)
            show(Emphasis("look"))
            assert ("\x1b[33m" in terminal.sent()) == coloured, (name, value)


# --- logs and versions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("convert images --to tar -o {out}/set --workers 1", ["2 shards of tar planned", "000000.tar: done, 1 of 2"]),
        ("verify images-tar --workers 1", ["opened ", "train-000000.tar (8 samples, ", "done, 2 of 2"]),
        ("index shards -o {out}/set --workers 1", ["2 tar shards (train 1, val 1); the index goes to", "done, 2 of 2"]),
        ("stage images-tar --target {out} --any-filesystem", ["to copy by", "train-000000.tar: ", "CRC32C"]),
        ("inspect images-tar", ["opened ", "images-tar (train): 8 samples"]),
    ],
)  # fmt: skip
def test_only_verbose_logs_the_steps(
    line: str, notes: list[str], place: Path, tmp_path: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json there are no notes, and stdout is one document."""
    monkeypatch.chdir(place)
    status, out, err = cli_run(*line.format(out=tmp_path / "a").split(), "-v", "--json")
    assert status == 0 and json.loads(out), err
    logged = [text for text in err.splitlines() if re.match(r"packer: +\d+\.\d{3} s  ", text)]
    assert logged == err.splitlines()
    assert "packer 0.1.0, Python" in logged[0] and "of memory in one process" in logged[-1]
    for text in notes:
        assert any(text in entry for entry in logged), err
    quiet = cli_run(*line.format(out=tmp_path / "b").split(), "--json")
    assert quiet[0] == 0 and quiet[2] == ""


def test_the_log_counts_listed_and_left_out_files(tmp_path: Path, cli_run: Packer) -> None:
    files = {"cat/1.jpg": make_jpeg(1), "cat/.2.jpg": b"", "cat/3.jpg": make_jpeg(1)[:-9]}
    line = ("convert", tree_of(tmp_path / "in", files), "--to", "tar", "-o", tmp_path / "out", "--on-error", "skip")
    status, out, err = cli_run(*line, "--workers", 1)
    assert status == 0 and "listed 2 samples (train 2), 1 class, " in err and "left out 1 file: 1 hidden" in err
    assert "left out: 1 skipped" in out


def test_versions_of_relevant_packages_are_shown(cli_run: Packer) -> None:
    status, shown, _ = cli_run("--version")
    assert status == 0 and shown.startswith(f"packer {library.__version__}\nPython ")
    for name in ("numpy", "h5py", "pillow", "simplejpeg", "crc32c", "zstandard", "click", "lazy_loader"):
        assert f"{name} {metadata.version(name)}" in shown
