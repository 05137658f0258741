import pytest
import torch

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.models.vit_unet import build_model
from seg4k.training.compilation import compile_segments, regions
from tests.helpers import configuration


def model_of(mode):
    torch.manual_seed(0)
    config = configuration("experiment=smoke", "model.encoder.name=vit_tiny_patch16_224")["model"]
    model = build_model(config, num_classes=3, image_size=(32, 32))
    plan = make_plan(mode, list(model.segments()))
    return model, apply_activation_checkpointing(model, plan, audit="off")


def gradients(model):
    image = torch.randint(
        0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    model.zero_grad()
    loss = model.head(model.forward_features(image)).square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "stage", "block", "selective", "layer", "encoder", "decoder"])
def test_regions_cover_the_model_once(mode):
    model, applied = model_of(mode)
    found = regions(model.segments(), applied)
    assert not any(one != other and one.startswith(f"{other}.") for one in found for other in found)
    covered = [parameter for module in found.values() for parameter in module.parameters()]
    assert len(covered) == len({id(parameter) for parameter in covered})
    missed = {
        name for name, parameter in model.named_parameters() if all(parameter is not one for one in covered)
    }
    # The head, and the encoder's last norm where its stage is not compiled as one.
    assert {name.split(".")[0] for name in missed} <= {"head", "encoder"}
    assert all("norm" in name for name in missed if name.startswith("encoder"))


@pytest.mark.slow  # a minute of compiling each
@pytest.mark.parametrize(("mode", "graphs"), [("none", 10), ("block", 10), ("stage", 11), ("selective", 11)])
@pytest.mark.filterwarnings("ignore")  # of the compiler, about this machine
def test_compiled_segments_compute_the_same_and_equal_ones_are_compiled_once(mode, graphs):
    from torch._dynamo.utils import counters

    loss, expected = gradients(model_of(mode)[0])
    torch._dynamo.reset()
    counters.clear()
    model, applied = model_of(mode)
    names = list(model.state_dict())
    compile_segments(model, applied)
    assert list(model.state_dict()) == names
    compiled_loss, found = gradients(model)
    # Patch embedding, four neck levels, four decoder blocks, and one graph for all twelve blocks; as stages,
    # one for the first three and one for the last, which ends in a norm.
    assert counters["stats"]["unique_graphs"] == graphs
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
