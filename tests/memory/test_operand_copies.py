import pytest
import torch

from seg4k.memory.operand_copies import copied_operand_bytes

aten = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default


def features(layout=torch.contiguous_format):
    return torch.empty((2, 8, 32, 16), device="meta").contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_only_what_is_in_pieces_is_copied(layout):
    whole = features(layout)
    weight = torch.empty((4, 8, 3, 3), device="meta").contiguous(memory_format=layout)
    rows = whole[:, :, 4:12]
    copy = 2 * 8 * 8 * 16 * 4
    assert copied_operand_bytes(FORWARD, (whole, weight)) == 0
    assert copied_operand_bytes(FORWARD, (rows, weight)) == copy
    assert copied_operand_bytes(BACKWARD, (rows, whole, weight)) == copy


def test_operands_in_one_piece_are_not_copied():
    whole, weight = features(), torch.empty((4, 8, 3, 3), device="meta")
    assert copied_operand_bytes(FORWARD, (whole, weight)) == 0
    assert copied_operand_bytes(aten.relu.default, (whole[:, :, 4:12],)) == 0
    sequence = torch.empty((2, 8, 32), device="meta")
    assert copied_operand_bytes(FORWARD, (sequence[:, :, 4:12], torch.empty((4, 8, 3), device="meta"))) == 0
