import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seg4k.activation_checkpointing import fingerprint as module
from seg4k.activation_checkpointing.fingerprint import fingerprint

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.fixture(autouse=True, params=[5, 64, 1 << 17])
def chunk(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK, "cpu", request.param)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensor(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), shapes, st.integers(0, 99), st.data())
def test_one_bit_tells(dtype, shape, seed, data):
    tensor = random_tensor(dtype, shape, seed)
    before = fingerprint(tensor)
    assert before == fingerprint(tensor.clone())
    raw = bits(tensor)
    byte = data.draw(st.integers(0, len(raw) - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    raw[byte] ^= 1 << bit
    assert not fingerprint(tensor).matches(before)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), shapes, st.integers(0, 99), st.data())
def test_content_counts_and_layout_does_not(dtype, shape, seed, data):
    tensor = random_tensor(dtype, shape, seed)
    expected = fingerprint(tensor)
    order = data.draw(st.permutations(range(len(shape))))
    inverse = [order.index(dim) for dim in range(len(shape))]
    turned = tensor.permute(*order).contiguous().permute(*inverse)
    padded = torch.zeros([n + 1 for n in shape], dtype=dtype)
    gaps = padded[tuple(slice(1, None) for _ in shape)]
    gaps.copy_(tensor)
    assert fingerprint(turned) == fingerprint(gaps) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_that_a_plain_sum_would_miss(dtype):
    tensor = random_tensor(dtype, (6, 8), 3)
    seen = {fingerprint(tensor)}
    for other in (
        tensor.flip(0),
        tensor.flip(1),
        tensor.roll(1, 1),
        tensor.t().reshape(6, 8),
        torch.zeros_like(tensor),
    ):
        assert fingerprint(other) not in seen
        seen.add(fingerprint(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flipped_signs_tell(dtype):
    tensor = torch.randn(64).to(dtype)
    for count in (1, 2, 16, 64):
        other = tensor.clone()
        other[:count] *= -1
        assert not fingerprint(other).matches(fingerprint(tensor))
    zeros = torch.zeros(64, dtype=dtype)
    assert not fingerprint(-zeros).matches(fingerprint(zeros))


def test_nan_equals_itself_and_empty_tensors_are_fine():
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    assert fingerprint(nan).matches(fingerprint(nan.clone()))
    assert fingerprint(torch.zeros(0, 3)) == fingerprint(torch.zeros(0, 3))
    assert fingerprint(torch.zeros(0, 3)) != fingerprint(torch.zeros(3, 0))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))


def test_an_expanded_tensor_costs_what_it_holds():
    huge = torch.ones(1).expand(1 << 40)
    assert fingerprint(huge) == fingerprint(torch.ones(1).expand(1 << 40))
    assert fingerprint(huge) != fingerprint(torch.ones(1).expand(1 << 39))


def test_what_cannot_be_read_has_none():
    assert fingerprint(torch.empty(3, device="meta")) is None
    assert fingerprint(torch.eye(3).to_sparse()) is None
    with torch._subclasses.FakeTensorMode():
        assert fingerprint(torch.empty(3)) is None


def test_views_of_conjugates_and_negatives():
    value = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(value.conj()) == fingerprint(value.conj().resolve_conj())
    assert fingerprint(value.conj().imag) == fingerprint(value.conj().imag.resolve_neg())


def test_no_random_state_is_touched():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    module._weights.cache_clear()
    fingerprint(torch.ones(7))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dtype", "slack"), [(torch.float32, 1e-7), (torch.float64, 1e-7), (torch.bfloat16, 1e-3)]
)
def test_where_kernels_may_be_nondeterministic_last_places_do_not_count(dtype, slack):
    """The fingerprint of CUDA, taken on the CPU."""
    torch.manual_seed(0)
    tensor = torch.randn(500, 70)

    def sums(value):
        value = value.to(dtype)
        return module.Fingerprint(tuple(value.shape), dtype, None, module._sums(value))

    same = sums(tensor * (1 + slack * torch.randn(500, 70)))
    assert same.matches(sums(tensor))
    for other in (tensor * 1.05, tensor.flip(0), tensor.roll(1), -tensor, tensor * random_mask(tensor)):
        assert not sums(other).matches(sums(tensor))
    nan = tensor.clone()
    nan[0, 0] = float("nan")
    assert sums(nan).matches(sums(nan))
    assert not sums(nan).matches(sums(tensor))


def random_mask(tensor):
    return (torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)) > 0.3) / 0.7
