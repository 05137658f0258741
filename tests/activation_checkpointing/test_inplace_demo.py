from seg4k.activation_checkpointing import inplace_demo


def test_an_in_place_operation_put_in_on_purpose_is_an_error(capsys):
    inplace_demo.main()
    lines = capsys.readouterr().out.splitlines()
    by_torch = [line for line in lines if "torch.utils.checkpoint:" in line]
    errors = [line for line in lines if "ActivationCheckpointingError: segment decoder.block0" in line]
    assert len(by_torch) == len(errors) == len(inplace_demo.CASES)
    assert not any("wrong by 0%" in line for line in by_torch)
