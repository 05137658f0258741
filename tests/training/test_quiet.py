import logging

import pytest

from seg4k.training.quiet import quiet


def reached(name):
    """The handlers that a line of this logger comes to."""
    logger, handlers = logging.getLogger(name), []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return handlers


@pytest.mark.parametrize("library", ["huggingface_hub", "lightning.pytorch"])
def test_a_line_of_a_library_appears_once_under_hydras_logging(library, monkeypatch):
    hydras, its_own = logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [hydras])
    logging.getLogger(library).addHandler(its_own)
    assert its_own in reached(f"{library}.module")
    quiet()
    assert reached(f"{library}.module") == [hydras]
