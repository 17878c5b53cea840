"""Where conversion tasks run: each engine is a `concurrent.futures.Executor` made by one file."""
