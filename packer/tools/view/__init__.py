"""`packer view`: a web page that shows the samples of a set, a folder, an archive or an address.

places             readers of packed sets and of unpacked sources
document           columns as .npy, orders with runs, histograms, the scan of all samples; view.json
predictions        predicted labels of a model, to compare with the labels of a set
samples            one sample: bytes, facts, thumbnails; batches as in training
answers, server    requests and answers, over HTTP on 127.0.0.1
export             a page with thumbnails for any web server; serving an exported page
page               the page: HTML, CSS and JavaScript, which loads nothing else
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from cache.remote import is_remote
from packer.tools.view.answers import Answers
from packer.tools.view.document import View, open_view
from packer.tools.view.export import ExportSite, ViewExport, export_view, is_export
from packer.tools.view.server import ViewServer

__all__ = ["ViewExport", "Viewing", "export_view", "view"]


class Viewing:
    """A served page; close it, or use it in a `with` statement.

    url: address for a browser on this machine. It contains a token that gives access to the samples.
    """

    def __init__(self, view: View | None, server: ViewServer) -> None:
        self._view, self._server = view, server
        self.url, self.port = server.url, server.port

    def close(self) -> None:
        """Stop serving, and close the opened place. A second call does nothing."""
        self._server.close()
        if self._view is not None:
            self._view.close()

    def __enter__(self) -> Viewing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def view(
    place: str | os.PathLike[str],
    *,
    split: str | None = None,
    port: int = 0,
    predictions: str | os.PathLike[str] | None = None,
) -> Viewing:
    """Serve a page on 127.0.0.1 that shows the samples of a place, from threads of this process until it is closed.

    place: a packed set by its directory or address, any source of `packer.convert`, such as a folder or an archive, or
        an exported page.
    split: the only split to show; None for all.
    port: 0 for a free port.
    predictions: a CSV file with the columns key and predicted and, if known, score or loss. The page shows them with
        the labels, and can sort by the worst mistakes.

    Raises DatasetError, UnknownNameError, StaleIndexError, RemoteError, SourceError, MissingExtraError, ServingError.
    """
    if not is_remote(place) and is_export(Path(place)):
        if split is not None:
            raise ValueError(f"{place}: is an exported page, which has its splits; leave split out")
        if predictions is not None:
            raise ValueError(f"{place}: is an exported page; view the set itself with predictions")
        return Viewing(None, ViewServer(ExportSite(Path(place)), port))
    opened = open_view(place, split, predictions)
    try:
        return Viewing(opened, ViewServer(Answers(opened), port))
    except BaseException:
        opened.close()
        raise
