import json
import math

import pytest

from seg4k.errors import UserError
from seg4k.training.ranges import RANGES, check_ranges
from seg4k.training.train import train
from tests.helpers import configuration, smoke
from tests.test_conf import EXPERIMENTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
def test_every_experiment_lies_within(experiment, optimizer, schedule):
    check_ranges(configuration(f"experiment={experiment}", f"optimizer={optimizer}", f"schedule={schedule}"))


def changed(key, value, *overrides):
    config = configuration("experiment=smoke", *overrides)
    *groups, name = key.split(".")
    inner = config
    for group in groups:
        inner = inner[group]
    assert name in inner
    inner[name] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("seed", -1, "a whole number from 0 to 4294967295"),
        ("seed", 1.5, "a whole number"),
        ("seed", 2**32, "a whole number"),
        ("batch.per_device", 1.5, "a whole number of 1 or more"),
        ("batch.effective", 0, "a whole number of 1 or more"),
        ("trainer.max_steps", True, "a whole number of 1 or more"),
        ("trainer.val_every_steps", 1.5, "a whole number of 1 or more"),
        ("trainer.gradient_clip", -1, "a number of 0 or more"),
        ("trainer.gradient_clip", math.nan, "a number of 0 or more"),
        ("trainer.ema_decay", 2, "a number from 0 to below 1"),
        ("trainer.ema_decay", 1.0, "a number from 0 to below 1"),
        ("optimizer.weight_decay", -1, "a number of 0 or more"),
        ("optimizer.betas", [0.9, 2], "a list, each a number from 0 to below 1"),
        ("optimizer.betas", None, "a list, each a number from 0 to below 1"),
        ("schedule.warmup_steps", -1, "a whole number of 0 or more"),
        ("schedule.final_ratio", 2, "a number from 0 to 1"),
        ("model.encoder.dropout", 2, "a number from 0 to below 1"),
        ("model.encoder.drop_path", 3, "a number from 0 to below 1"),
        ("model.decoder.channels", [16, 16, 8, 0], "a list, each a whole number of 1 or more"),
        ("model.decoder.channels", [16, 16, 8, 8.5], "a list, each a whole number of 1 or more"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(key, value, allowed):
    with pytest.raises(UserError) as caught:
        check_ranges(changed(key, value))
    shown = "null" if value is None else value
    assert str(caught.value).startswith(f"{key}={shown}: give {allowed}")


def test_every_key_of_the_table_is_one_of_the_configuration():
    configurations = [
        configuration(*overrides)
        for overrides in ((), ("optimizer=sgd",), ("schedule=polynomial",), ("optimizer=adamw_8bit",))
    ]

    def holds(config, key):
        for part in key.split("."):
            if part not in config:
                return False
            config = config[part]
        return True

    assert all(any(holds(config, key) for config in configurations) for key in RANGES)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("data", "image_size", 512), ("data", "image_size", [64]), ("optimizer", "weight_decay", -1)],
)
def test_a_card_says_so(tmp_path, group, key, value):
    config = smoke(tmp_path)
    config[group][key] = value
    with pytest.raises(UserError, match=key):
        train(config, tmp_path, "")
    assert key in json.loads((tmp_path / "run_card.json").read_text())["error"]
