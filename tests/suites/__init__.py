"""Contracts, as classes of tests: the promises of every implementation of a seam.

A suite is a base class under a name that pytest does not collect. The tests of an implementation subclass it and make
the implementation in one or two fixtures; the subclass inherits every test of the contract. Further promises of an
implementation are tested next to the subclass, outside the suite.

    readers   ReaderSuite   random access to n samples
    sources   SourceSuite   a list of samples, and their bytes
    feeds     FeedSuite     batches: every sample once an epoch, resumable on any ranks
    stores    StoreSuite    bytes at ranges of files
    formats   FormatSuite   `locate` finds what the writer reports as written
    shared_caches   SharedCacheSuite   memory that processes share

Shared modules: samples (test data with the expected values), layouts (small sources with their expected content, on
which SourceSuite runs), children (forked processes) and programs (commands, run as users run them).
"""
