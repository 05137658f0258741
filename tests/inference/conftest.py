import pytest

from seg4k.training.train import train
from tests.helpers import make_folder, smoke


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(root, tmp_path_factory):
    """A run that has learned its folder: its card and its checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    config = smoke(root, "trainer.max_steps=12", "trainer.val_every_steps=12", "optimizer.lr=0.01")
    card = train(config, directory, "")
    return card, directory / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def checkpoint(trained):
    return trained[1]
