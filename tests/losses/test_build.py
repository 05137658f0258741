from pathlib import Path

import pytest
import torch
import yaml

from seg4k.errors import UserError
from seg4k.losses.build import TERMS, build_loss, strip_options
from seg4k.losses.strips import DEFAULT_STRIP_BYTES

CONF = Path(__file__).parents[2] / "conf" / "loss"
FILES = sorted(CONF.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("classes", [1, 2, 19])
def test_every_configuration_builds_and_computes(path, classes):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    loss = build_loss(config, classes)
    logits = torch.randn(1, classes, 4, 4, requires_grad=True)
    value = loss(logits, torch.randint(0, 2, (1, 4, 4)))
    value.backward()
    assert value > 0
    assert logits.grad.abs().sum() > 0
    assert strip_options(config) == ("auto", DEFAULT_STRIP_BYTES)


def test_the_configurations_are_the_objectives_and_one_sum():
    assert {path.stem for path in FILES} == {*TERMS, "ce_dice"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_configurations_state_the_defaults_and_comment_every_key(path):
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    for line in text.splitlines():
        assert line.startswith(("#", "  ")) or "# " in line
    for name in config["terms"]:
        for key, default in TERMS[name].items():
            assert config[key] == default


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_key_is_without_effect(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    torch.manual_seed(0)
    logits, target = torch.randn(1, 4, 5, 5), torch.randint(0, 4, (1, 5, 5))
    value = build_loss(config, 4)(logits, target).item()
    for key in config.keys() - {"terms", "strips", "strip_bytes", "class_weights"}:
        assert build_loss({**config, key: config[key] + 0.5}, 4)(logits, target).item() != value
    assert build_loss({**config, "class_weights": [1.0, 2.0, 3.0, 4.0]}, 4)(logits, target).item() != value


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"loss\.terms must name at least one of ce, focal"),
        ({"terms": "ce"}, r"loss\.terms must name"),
        ({"terms": {"lovasz": 1.0}}, r"unknown objective 'lovasz'; choose from ce, focal, dice"),
        ({"terms": {"ce": -1.0}}, r"loss\.terms\.ce must be a number from 0 on, got -1\.0"),
        ({"terms": {"ce": "much"}}, r"loss\.terms\.ce must be a number"),
        ({"terms": {"ce": float("inf")}}, r"loss\.terms\.ce must be finite"),
        ({"terms": {"ce": float("nan")}}, r"loss\.terms\.ce must be a number"),
        ({"terms": {"ce": 0.0, "dice": 0}}, r"loss\.terms are all 0"),
        (
            {"terms": {"dice": 1.0}, "label_smoothing": 0.1},
            r"loss\.label_smoothing has no effect with the terms dice",
        ),
        ({"terms": {"ce": 1.0}, "lable_smoothing": 0.1}, r"loss\.lable_smoothing has no effect"),
        (
            {"terms": {"ce": 1.0}, "label_smoothing": 1.5},
            r"loss\.label_smoothing must be a number from 0 to 1, got 1\.5",
        ),
        ({"terms": {"focal": 1.0}, "gamma": -2}, r"loss\.gamma must be a number from 0 to 100"),
        ({"terms": {"tversky": 1.0}, "alpha": 0, "beta": 0}, r"loss\.alpha and loss\.beta are both 0"),
        (
            {"terms": {"ce": 1.0}, "class_weights": [1.0]},
            r"loss\.class_weights must be null or a list of 3 numbers",
        ),
        ({"terms": {"ce": 1.0}, "class_weights": "abc"}, r"loss\.class_weights must be null or a list of 3"),
        (
            {"terms": {"ce": 1.0}, "class_weights": [1, 1, -1]},
            r"each of loss\.class_weights must be a number from 0",
        ),
        ({"terms": {"ce": 1.0}, "class_weights": [0, 0, 0]}, r"loss\.class_weights are all 0"),
        (
            {"terms": {"ce": 1.0}, "strips": 0},
            r"loss\.strips must be auto or a whole number from 1 on, got 0",
        ),
        ({"terms": {"ce": 1.0}, "strips": True}, r"loss\.strips must be auto"),
        ({"terms": {"ce": 1.0}, "strips": "many"}, r"loss\.strips must be auto"),
        ({"terms": {"ce": 1.0}, "strip_bytes": 0}, r"loss\.strip_bytes must be a whole number of bytes"),
        ({"terms": {"ce": 1.0}, "strip_bytes": 1e8}, r"loss\.strip_bytes must be a whole number of bytes"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_loss(config, 3)


def test_a_term_of_factor_zero_is_left_out():
    loss = build_loss({"terms": {"ce": 1.0, "dice": 0.0}}, 3)
    assert len(loss.terms) == 1
