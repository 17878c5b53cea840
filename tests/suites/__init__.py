"""Contracts, as classes of tests: the promises of every implementation of a seam.

A suite is a base class without a name that pytest collects. The test of an implementation subclasses it and says, with
one or two fixtures, how to make one; it then has every test of the contract. What an implementation promises besides
is tested next to it, outside of the suite.

    readers   ReaderSuite   random access to n samples
    sources   SourceSuite   a listing of samples, and their bytes
    feeds     FeedSuite     batches: every sample once an epoch, resumable on any ranks
    stores    StoreSuite    bytes at ranges of files
    formats   FormatSuite   what a writer says it wrote is what `locate` finds
    shared_caches   SharedCacheSuite   memory that processes share

What they have in common: samples (what they read, with what is true of it), layouts (small sets of sources, each with
what it has, on which SourceSuite runs), children (forked processes) and programs (commands, run as users run them).
"""
