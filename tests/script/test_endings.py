"""How a script ends is in its run, and presets give rules their data."""

from tests.script.conftest import ours
from tests.script.test_training_loops import EVALUATED, GAN, HEAD

import tensortap as tt

TRAIN = (
    HEAD
    + """
model = net()
model.spare = nn.Dropout()
model.forward = lambda x: model[2](model[1](model[0](x)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(12):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
)


def test_a_run_says_what_ended_it(scripts):
    """An exception or Ctrl-C that ends the script is named; a script that ends by itself is finished."""
    done, _ = scripts.observe(TRAIN + "raise KeyboardInterrupt")
    assert done.returncode != 0
    assert "ended by KeyboardInterrupt" in scripts.command("show", "run").stdout
    scripts.observe(TRAIN, "--overwrite")
    assert "finished" in scripts.command("show", "run").stdout


def test_one_rank_speaks(scripts):
    """Of several processes of a job only the first prints closing lines."""
    done, _ = scripts.observe(TRAIN, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 0 and ours(done) == []


def test_every_model_has_a_name(scripts):
    """No model is printed as unnamed."""
    done, _ = scripts.observe(GAN)
    assert any("netD (Judge)" in line and "netG (Up)" in line for line in ours(done))


def test_a_module_without_parameters_is_not_said_to_be_untrained(scripts):
    """`never_ran` is about modules that have something to train."""
    _, run = scripts.observe(TRAIN, "--sites", "**")
    assert "spare:output" in run.info["unseen"]
    assert "never_ran" not in {finding.rule for finding in run.findings()}


def test_the_recommended_preset_gives_rules_their_data(scripts):
    """`--watch recommended` leaves fewer rules without data, and `check` names it."""
    _, run = scripts.observe(EVALUATED, "--watch", "outputs")
    before = set(run.findings().skipped)
    assert "--watch recommended" in scripts.command("check", "run").stdout
    _, run = scripts.observe(EVALUATED, "--watch", "recommended", "--overwrite")
    assert set(run.findings().skipped) < before


def test_a_tap_that_an_error_ends(tmp_path):
    """`with tt.watch(...)` notes the error that left the block."""
    try:
        with tt.watch(to=tmp_path / "run"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert "ended_by" in (tmp_path / "run" / "rank=0" / "_rank.json").read_text()
