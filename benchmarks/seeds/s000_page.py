"""The page of `s000.py`: loading, training and the model, with the document's figures."""

from __future__ import annotations

import argparse
import math
from statistics import mean

from experiment import Page, figure, ratio  # isort: skip  (it sets the path)
from harness import Results
from s000_loaders import BASELINE, END_TO_END, LOADER, ROCAL_HIP, ROCAL_HOST
from s000_pixels import Reference
from s000_training import BATCH, FAULT, feature_network, frechet_distance, train_all

from packer.tools.report import charts

__all__ = ["publish"]

CELEBA = 162_770  # images of CelebA's training part
# Seconds of loading there: with PyTorch, rocAL on the host, rocAL on the GPU.
DOCUMENT = {"MI250X": (52.13, 26.20, 21.00), "MI300X": (49.41, 21.18, 18.18)}


def publish(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    _publish_loading(page, results)
    _publish_training(page, results)
    if arguments.steps:
        _publish_model(page, arguments)
    page.section("What does not compare")
    page.text(
        "The document measured on nodes of 64 and 96 cores with eight GPUs. It does not say how many images an epoch "
        "had, nor how many worker processes the DataLoader: ratios are what compares. Here every row has the same "
        "number of processes or threads. The files are in the page cache; on a parallel file system the rows that open "
        "a file for each image would lose more. rocAL resizes without antialiasing, which is less work and makes other "
        "pixels."
    )
    page.text(
        "On a CPU a training step would compete with the loaders for the same cores, so nothing is said of it there: "
        "the rows end to end, and those that decode on a GPU, run where there is one."
    )


def _publish_loading(page: Page, results: Results) -> None:
    times = {name: ratio(results, name, BASELINE, "images_s") for name in results}
    ran = sorted((name for name in results if times[name]), key=lambda name: -(times[name] or 0.0))
    if LOADER in ran:
        peers = ", ".join(f"{name} {times[name]:.2f}" for name in ran if name not in (LOADER, BASELINE))
        found = f"{LOADER.removeprefix('ours: ')} {times[LOADER]:.2f} times less" + (f"; {peers}" if peers else "")
        page.claim("loading takes 2.0 to 2.7 times less time than with PyTorch", found, (times[LOADER] or 0.0) >= 2.0)
    if ROCAL_HOST in ran:
        found = f"{times[ROCAL_HOST]:.2f} times"
        page.claim("rocAL on the host takes 2.0 to 2.3 times less time", found, (times[ROCAL_HOST] or 0.0) >= 2.0)
    page.section("Loading")
    there = {ROCAL_HOST: 1, ROCAL_HIP: 2}
    rows = []
    for name in ran:
        rates = [run["images_s"] for run in results[name]]
        rate = figure(results, name, "images_s") or 1.0
        document = "".join(f"{s[0] / s[there[name]]:.2f} ({k}), " for k, s in DOCUMENT.items() if name in there)
        rows.append(
            [
                f"**{name}**" if name.startswith("ours: ") else name,
                f"{rate:,.0f} ({min(rates):,.0f}–{max(rates):,.0f})",
                f"{CELEBA / rate:,.0f}",
                f"{times[name]:.2f}",
                f"{figure(results, name, 'cpu_us'):,.0f}",
                document.rstrip(", "),
            ]
        )
    headings = ["loader", "images/s (min–max)", f"s for CelebA's {CELEBA:,}", "times faster", "CPU µs an image"]
    page.table([*headings, "there"], rows)
    if ran:
        labels = [*ran, *(f"there, {name}" for name in there)]
        here = [times[name] for name in ran]
        documents = [mean(s[0] / s[place] for s in DOCUMENT.values()) for place in there.values()]
        ours = [number for number, name in enumerate(ran) if name.startswith("ours: ")]
        chart = charts.bars(labels, {"times faster": [*here, *documents]}, unit="×", strong=ours, line=(1.0, BASELINE))
        caption = "Times faster than PyTorch's DataLoader. The document's figures are means of its two nodes"
        page.chart("loading", chart, caption)
    seconds = "; ".join(f"{a:.2f}, {b:.2f} and {c:.2f} s ({name})" for name, (a, b, c) in DOCUMENT.items())
    page.text(f"The document, PyTorch, rocAL on the host and with HIP: {seconds}.")


def _publish_training(page: Page, results: Results) -> None:
    page.section("Training, end to end")
    page.text(
        "The document, with PyTorch, rocAL on the host and with HIP: 38:07, 32:19 and 32:51 minutes (MI250X); 16:44, "
        "16:13 and 16:11 (MI300X), where the steps take nearly all of the time."
    )
    ran = [name for name in results if figure(results, name, "train_images_s")]
    base = f"{BASELINE}, {END_TO_END}"
    rows = [
        [
            name,
            f"{figure(results, name, 'train_images_s'):,.0f}",
            f"{ratio(results, name, base, 'train_images_s') or math.nan:.2f}",
            f"{figure(results, name, 'waits_percent'):.0f} %",
        ]
        for name in ran
    ]
    if rows:
        page.table(["loader", "images/s", "times faster", "of the time waits for data"], rows)


def _publish_model(page: Page, arguments: argparse.Namespace) -> None:
    """Whether the model is the same: losses, and what it draws."""
    import torch

    found = train_all(arguments)
    reference = Reference.load(arguments.work / "reference.npz")
    data = feature_network(arguments.features)(torch.from_numpy(reference.images))
    by_row = {row: [one for one in found if one.row == row] for row in (BASELINE, LOADER, FAULT)}
    losses = {row: [one.loss for one in some] for row, some in by_row.items()}
    spread = max(max(losses[row]) - min(losses[row]) for row in (BASELINE, LOADER))
    apart = abs(mean(losses[BASELINE]) - mean(losses[LOADER]))
    page.claim(
        "a model trained on our batches has the same loss",
        f"the means of {arguments.trainings} seeds differ by {apart:.4f}, the seeds of a loader by up to {spread:.4f}",
        apart <= spread,
    )
    pairs = zip(by_row[BASELINE], by_row[LOADER], strict=True)
    loaders = [frechet_distance(a.features, b.features) for a, b in pairs]
    fault = frechet_distance(by_row[BASELINE][0].features, by_row[FAULT][0].features)
    seeds = [
        frechet_distance(some[i].features, some[j].features)
        for some in (by_row[BASELINE], by_row[LOADER])
        for i in range(arguments.trainings)
        for j in range(i)
    ]
    page.claim(
        "it draws the same images: their Fréchet distance is no larger than from seed to seed",
        f"between the loaders with the same seed {mean(loaders):.3g}, from seed to seed {min(seeds):.3g} to "
        f"{max(seeds):.3g}; with a fault, values from 0 to 1, {fault:.3g}",
        mean(loaders) <= max(seeds),
    )
    page.section("The model")
    network = "the document's network" if arguments.full else "a small network"
    of = f"those of {arguments.features.name}" if arguments.features else "those of a network of fixed random weights"
    page.text(
        f"Trained {arguments.trainings} times with each loader: {network}, {arguments.steps} steps of {BATCH} images; "
        f"the seed is that of weights, noise, order and flips. Loss: of the averaged network on "
        f"{min(arguments.judged, len(reference.images))} images, with the same noise for all; 1 is that of a network "
        f"that has learned nothing. Distance: Fréchet's, of {arguments.samples} samples to the images; the features "
        f"are {of}."
    )
    rows = []
    for row, some in by_row.items():
        distances = [frechet_distance(one.features, data) for one in some]
        cells = [", ".join(f"{value:.4f}" for value in losses[row]), ", ".join(f"{value:.3g}" for value in distances)]
        rows.append([row, *cells])
    page.table(["loader", "loss by seed", "distance to the data by seed"], rows)
    if not arguments.features:
        page.text(
            "Features of random weights see colours, contrasts and textures. They show whether two loaders give other "
            "images, not whether faces look like faces: the distances are not Inception's FID, and do not compare with "
            "published ones. `--features FILE` takes a TorchScript network for that, with more steps and samples."
        )
