"""What holds for the tests of every folder."""

import gc


def pytest_collection_finish() -> None:
    """Takes torch and the collected tests, which live to the end, out of what each garbage collection visits."""
    gc.collect()
    gc.freeze()
